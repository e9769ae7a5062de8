/* For every processor of an architecture; on aarch64 that includes its vector instructions. */
#define KERNELS reductions_plain
#include "reductions_loops.h"
