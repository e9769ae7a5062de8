// Sums of products in registers: image[rows[r] + columns[k]] * panel[k][v] summed over k, for a few rows r at a time
// and vectors of neighbors v.
#ifndef SYNKHRONOS_SUMS
#define SYNKHRONOS_SUMS

namespace synkhronos {

#if defined(__AVX512F__)
enum { BYTES = 64, ROWS = 12 };
#elif defined(__AVX__)
enum { BYTES = 32, ROWS = 6 };
#else
enum { BYTES = 16, ROWS = 6 };
#endif
// DEPTH: number of columns whose part of a panel stays in the first-level cache; CHUNK: number of rows whose sums do.
enum { HALF = ROWS / 2, DEPTH = 128, CHUNK = 96 };

template <typename T, typename Integer>
struct Vectors {
    typedef T vector __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
    typedef Integer indexes __attribute__((vector_size(BYTES)));
    enum { LANES = BYTES / sizeof(T), WIDTH = 2 * LANES };  // a line of a panel is two vectors
};
template <typename T>
struct Kind;
template <>
struct Kind<npy_float> : Vectors<npy_float, npy_int32> {};
template <>
struct Kind<npy_double> : Vectors<npy_double, npy_int64> {};

static inline int rounded(int n, int step) { return (n + step - 1) / step * step; }

// Uninitialized memory, aligned to 64 bytes; `data` is 0 if the allocation failed.
template <typename T>
struct Scratch {
    T *data;
    explicit Scratch(size_t n) : data(0) {
        void *memory;
        if (!posix_memalign(&memory, 64, n * sizeof(T) + 64)) data = (T *)memory;
    }
    ~Scratch() { free(data); }
    T &operator[](size_t i) { return data[i]; }

   private:
    Scratch(const Scratch &);
    void operator=(const Scratch &);
};

// Adds the sums of R rows over n columns to `sums`, or stores them there (`put`). Those of row r are in line lines[r].
template <typename T, int R, int N>
static inline void add_up(const T *__restrict__ image, const int *__restrict__ rows, const int *__restrict__ columns, int n,
                          const T *__restrict__ panel, T *__restrict__ sums, const int *__restrict__ lines, bool put) {
    typedef typename Kind<T>::vector V;
    enum { LANES = Kind<T>::LANES, WIDTH = Kind<T>::WIDTH };
    V sum[R][N];
    const T *row[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        row[r] = image + rows[r];
#pragma GCC unroll 2
        for (int v = 0; v < N; v++) sum[r][v] = V{};
    }
    for (int k = 0; k < n; k++) {
        const T *line = panel + (npy_intp)k * WIDTH;
        npy_intp column = columns[k];
        V neighbours[N];
#pragma GCC unroll 2
        for (int v = 0; v < N; v++) neighbours[v] = *(const V *)(line + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int v = 0; v < N; v++) sum[r][v] += row[r][column] * neighbours[v];
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < N; v++) {
            V *to = (V *)(sums + (npy_intp)lines[r] * WIDTH + v * LANES);
            *to = put ? sum[r][v] : *to + sum[r][v];
        }
}

// Calls `add_up` for many rows, whose number is rounded up to a multiple of HALF. Only `used` neighbors of a line are
// needed.
template <typename T>
static void multiply(const T *image, const int *rows, int n_rows, const int *columns, int n, const T *panel, int used,
                     T *sums, const int *lines, bool put) {
    bool both = used > Kind<T>::LANES;
    int r = 0;
    for (; r + HALF < n_rows; r += ROWS)
        (both ? add_up<T, ROWS, 2> : add_up<T, ROWS, 1>)(image, rows + r, columns, n, panel, sums, lines + r, put);
    if (r < n_rows)
        (both ? add_up<T, HALF, 2> : add_up<T, HALF, 1>)(image, rows + r, columns, n, panel, sums, lines + r, put);
}

// Transposes a matrix: to[j * to_step + i] = from[i * from_step + j].
template <typename T>
static void turn(const T *__restrict__ from, npy_intp from_step, int n, int m, T *__restrict__ to, npy_intp to_step) {
    enum { LANES = Kind<T>::LANES };
    int i = 0;
#if defined(__GNUC__) && !defined(__clang__)
    // Transpose squares of LANES x LANES in log2(LANES) steps, each of which exchanges blocks between pairs of lines.
    typedef typename Kind<T>::vector V;
    typedef typename Kind<T>::indexes Indexes;
    for (; i + LANES <= n; i += LANES) {
        int j = 0;
        for (; j + LANES <= m; j += LANES) {
            V line[LANES];
#pragma GCC unroll 16
            for (int l = 0; l < LANES; l++) line[l] = *(const V *)(from + (i + l) * from_step + j);
#pragma GCC unroll 4
            for (int half = 1; half < LANES; half *= 2) {
                Indexes low, high;
                for (int l = 0; l < LANES; l++) {
                    low[l] = l & half ? l - half + LANES : l;
                    high[l] = l & half ? l + LANES : l + half;
                }
#pragma GCC unroll 16
                for (int l = 0; l < LANES; l++)
                    if (!(l & half)) {
                        V one = line[l], other = line[l + half];
                        line[l] = __builtin_shuffle(one, other, low);
                        line[l + half] = __builtin_shuffle(one, other, high);
                    }
            }
#pragma GCC unroll 16
            for (int l = 0; l < LANES; l++) *(V *)(to + (j + l) * to_step + i) = line[l];
        }
        for (; j < m; j++)
            for (int l = 0; l < LANES; l++) to[j * to_step + i + l] = from[(i + l) * from_step + j];
    }
#endif
    for (; i < n; i++)
        for (int j = 0; j < m; j++) to[j * to_step + i] = from[i * from_step + j];
}
}  // namespace synkhronos
#endif
