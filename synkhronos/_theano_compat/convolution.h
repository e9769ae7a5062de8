// Correlations of images with filters, and both gradients, without copying the windows of each image (im2col). They are
// sums of image[rows[r] + columns[k]] * panel[k][v] over k, in registers, for a few
// rows at a time and vectors of neighbors.
//
// Forward, rows (r) are pixels of the output, columns (k) are taps of the filters, and neighbors (v) are filters. For
// the gradient with respect to the weights, rows are taps and columns are pixels. For the gradient with respect to the
// images, columns are filters and neighbors are channels; the sums of each tap are added to the pixels that it reads.
#ifndef SYNKHRONOS_CONVOLUTION
#define SYNKHRONOS_CONVOLUTION

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

// One axis of a correlation: `in` elements, padded by `before` and `behind` zeros; a filter of `taps` elements; `out`
// results.
struct Axis {
    int in, before, behind, taps, out, stride, dilation;
};

// The distance between channels, in elements: an odd multiple of a cache line.
template <typename T>
static int channel_step(int area) {
    enum { LINE = 64 / sizeof(T) };
    return (rounded(area, LINE) / LINE | 1) * LINE;
}

// Images padded with zeros. The distance between channels is an odd multiple of a cache line, because channels at a
// distance of a power of two would use only few sets of the cache.
template <typename T>
struct Padded {
    int images, channels, width, area, step;
    const Axis y, x;
    Scratch<T> data;
    Padded(int images, int channels, const Axis &y, const Axis &x)
        : images(images), channels(channels), width(x.before + x.in + x.behind),
          area((y.before + y.in + y.behind) * width), step(channel_step<T>(area)), y(y), x(x),
          data((size_t)images * channels * step) {
        if (data.data) memset(data.data, 0, sizeof(T) * images * channels * step);
    }
    void take(const T *from, int n) {
        for (int c = 0; c < n * channels; c++)
            for (int i = 0; i < y.in; i++)
                memcpy(data.data + (size_t)c * step + (y.before + i) * width + x.before,
                       from + ((size_t)c * y.in + i) * x.in, sizeof(T) * x.in);
    }
};

// Positions of elements, followed by ROWS dummy positions, because `multiply` rounds the number of rows up.
struct Positions {
    int n;
    Scratch<int> data;
    explicit Positions(int most) : n(0), data(most + ROWS) {}
    void add(int position) { data[n++] = position; }
    void finish(int behind) {
        for (int i = 0; i < ROWS; i++) data[n + i] = behind;
    }
};

struct Correlation {
    int images, channels, filters;
    Axis y, x;
    int kernel() const { return y.taps * x.taps; }
    int width() const { return x.before + x.in + x.behind; }
    int area() const { return (y.before + y.in + y.behind) * width(); }
    int last_tap() const { return (y.taps - 1) * y.dilation * width() + (x.taps - 1) * x.dilation; }
    int pixels() const { return y.out * x.out; }
    size_t image_in() const { return (size_t)channels * y.in * x.in; }
    size_t image_out() const { return (size_t)filters * pixels(); }
    // The number of images to process together, so that small images fill the registers and reuse the weights.
    int together(size_t bytes) const {
        int n = std::min(images, (CHUNK + pixels() - 1) / pixels());
        return std::max(1, (int)std::min((size_t)n, ((size_t)1 << 20) / bytes));
    }
};

// Adds the position that the first tap reads, for each pixel of each image.
template <typename T>
static void add_pixels(Positions &pixels, const Padded<T> &image, const Axis &y, const Axis &x) {
    for (int b = 0; b < image.images; b++)
        for (int i = 0; i < y.out; i++)
            for (int j = 0; j < x.out; j++)
                pixels.add(b * image.channels * image.step + i * y.stride * image.width + j * x.stride);
    pixels.finish(0);
}

// Adds the offset of each tap from the first tap.
template <typename T>
static void add_taps(Positions &taps, const Padded<T> &image, const Axis &y, const Axis &x) {
    for (int c = 0; c < image.channels; c++)
        for (int i = 0; i < y.taps; i++)
            for (int j = 0; j < x.taps; j++)
                taps.add(c * image.step + i * y.dilation * image.width + j * x.dilation);
    taps.finish(0);
}

static void add_lines(Positions &lines, int n) {
    for (int i = 0; i < n; i++) lines.add(i);
    lines.finish(n);
}

// Computes the output of all images; returns false if memory is short.
template <typename T>
static bool forward(const Correlation &of, const T *images, const T *weights, T *out) {
    enum { WIDTH = Kind<T>::WIDTH };
    int n_taps = of.channels * of.kernel(), n_pixels = of.pixels();
    size_t padded = (size_t)of.channels * channel_step<T>(of.area()) * sizeof(T);
    Padded<T> image(of.together(padded), of.channels, of.y, of.x);
    Positions pixels(image.images * n_pixels), taps(n_taps), lines(CHUNK);
    Scratch<T> panels((size_t)rounded(of.filters, WIDTH) * n_taps);
    if (!image.data.data || !pixels.data.data || !taps.data.data || !lines.data.data || !panels.data) return false;
    add_pixels(pixels, image, of.y, of.x);
    add_taps(taps, image, of.y, of.x);
    add_lines(lines, CHUNK);
    for (int f = 0; f < rounded(of.filters, WIDTH); f++)
        for (int k = 0; k < n_taps; k++)
            panels[(size_t)(f / WIDTH * WIDTH) * n_taps + (size_t)k * WIDTH + f % WIDTH] =
                f < of.filters ? weights[(size_t)f * n_taps + k] : T(0);
    T tile[(CHUNK + ROWS) * WIDTH] __attribute__((aligned(64)));
    for (int n = 0; n < of.images; n += image.images) {
        int some = std::min(image.images, of.images - n);
        image.take(images + n * of.image_in(), some);
        for (int first = 0; first < some * n_pixels; first += CHUNK) {
            int last = std::min(first + (int)CHUNK, some * n_pixels);
            for (int f = 0; f < of.filters; f += WIDTH) {
                int used = std::min((int)WIDTH, of.filters - f);
                const T *panel = panels.data + (size_t)f * n_taps;
                for (int k = 0; k < n_taps; k += DEPTH)
                    multiply<T>(image.data.data, pixels.data.data + first, last - first, taps.data.data + k,
                                std::min((int)DEPTH, n_taps - k), panel + (size_t)k * WIDTH, used, tile, lines.data.data,
                                k == 0);
                for (int p = first, end; p < last; p = end) {  // pixels of one image at a time
                    end = std::min(last, (p / n_pixels + 1) * n_pixels);
                    turn<T>(tile + (p - first) * WIDTH, WIDTH, end - p, used,
                            out + (n + p / n_pixels) * of.image_out() + (size_t)f * n_pixels + p % n_pixels, n_pixels);
                }
            }
        }
    }
    return true;
}

// Computes the gradient with respect to the weights; returns false if memory is short. The sums over the pixels of each
// group of images are added to those of earlier groups.
template <typename T>
static bool weights_gradient(const Correlation &of, const T *images, T *weights, const T *out) {
    enum { WIDTH = Kind<T>::WIDTH };
    int n_taps = of.channels * of.kernel(), n_pixels = of.pixels(), n_lines = rounded(n_taps, ROWS);
    size_t padded = (size_t)of.channels * channel_step<T>(of.area()) * sizeof(T);
    Padded<T> image(of.together(padded), of.channels, of.y, of.x);
    Positions pixels(image.images * n_pixels), taps(n_taps), lines(n_taps);
    Scratch<T> panel((size_t)image.images * n_pixels * WIDTH), sums((size_t)n_lines * rounded(of.filters, WIDTH));
    if (!image.data.data || !pixels.data.data || !taps.data.data || !lines.data.data || !panel.data || !sums.data)
        return false;
    add_pixels(pixels, image, of.y, of.x);
    add_taps(taps, image, of.y, of.x);
    add_lines(lines, n_taps);
    memset(panel.data, 0, sizeof(T) * image.images * n_pixels * WIDTH);
    for (int n = 0; n < of.images; n += image.images) {
        int some = std::min(image.images, of.images - n);
        image.take(images + n * of.image_in(), some);
        for (int f = 0; f < of.filters; f += WIDTH) {
            int used = std::min((int)WIDTH, of.filters - f);
            for (int b = 0; b < some; b++)
                turn<T>(out + (n + b) * of.image_out() + (size_t)f * n_pixels, n_pixels, used, n_pixels,
                        panel.data + (size_t)b * n_pixels * WIDTH, WIDTH);
            for (int p = 0; p < some * n_pixels; p += DEPTH)
                multiply<T>(image.data.data, taps.data.data, n_taps, pixels.data.data + p,
                            std::min((int)DEPTH, some * n_pixels - p), panel.data + (size_t)p * WIDTH, used,
                            sums.data + (size_t)f * n_lines, lines.data.data, n == 0 && p == 0);
        }
    }
    for (int f = 0; f < of.filters; f += WIDTH)
        turn<T>(sums.data + (size_t)f * n_lines, WIDTH, n_taps, std::min((int)WIDTH, of.filters - f),
                weights + (size_t)f * n_taps, n_taps);
    return true;
}

// Computes the gradient with respect to the images; returns false if memory is short. Each tap's sums over the filters
// are added to the pixels that it reads. A line of `sums` is a pixel of a padded image, with WIDTH channels at a time.
template <typename T>
static bool images_gradient(const Correlation &of, T *images, const T *weights, const T *out) {
    enum { WIDTH = Kind<T>::WIDTH };
    int n_pixels = of.pixels(), blocks = rounded(of.channels, WIDTH) / WIDTH;
    int width = of.width(), area = of.area();
    const Axis y = {of.y.out, 0, 0, 1, of.y.out, 1, 1}, x = {of.x.out, 0, 0, 1, of.x.out, 1, 1};
    size_t padded = ((size_t)of.filters * channel_step<T>(n_pixels) + (size_t)area * WIDTH) * sizeof(T);
    Padded<T> image(of.together(padded), of.filters, y, x);
    Positions pixels(image.images * n_pixels), lines(image.images * n_pixels), filters(of.filters);
    size_t n_sums = ((size_t)image.images * area + of.last_tap() + 1) * WIDTH;
    Scratch<T> panels((size_t)of.kernel() * blocks * of.filters * WIDTH), sums(n_sums);
    if (!image.data.data || !pixels.data.data || !lines.data.data || !filters.data.data || !panels.data || !sums.data)
        return false;
    add_pixels(pixels, image, y, x);
    for (int b = 0; b < image.images; b++)
        for (int i = 0; i < of.y.out; i++)
            for (int j = 0; j < of.x.out; j++) lines.add(b * area + i * of.y.stride * width + j * of.x.stride);
    lines.finish(image.images * area);  // dummy rows add to lines after all images, which are not read
    for (int f = 0; f < of.filters; f++) filters.add(f * image.step);
    for (int k = 0; k < of.kernel(); k++)
        for (int f = 0; f < of.filters; f++)
            for (int c = 0; c < blocks * WIDTH; c++)
                panels[(((size_t)k * blocks + c / WIDTH) * of.filters + f) * WIDTH + c % WIDTH] =
                    c < of.channels ? weights[((size_t)f * of.channels + c) * of.kernel() + k] : T(0);
    for (int n = 0; n < of.images; n += image.images) {
        int some = std::min(image.images, of.images - n);
        image.take(out + n * of.image_out(), some);
        for (int block = 0; block < blocks; block++) {
            int used = std::min((int)WIDTH, of.channels - block * WIDTH);
            memset(sums.data, 0, sizeof(T) * n_sums);
            for (int k = 0; k < of.kernel(); k++) {
                const T *panel = panels.data + ((size_t)k * blocks + block) * of.filters * WIDTH;
                int tap = k / of.x.taps * of.y.dilation * width + k % of.x.taps * of.x.dilation;
                for (int f = 0; f < of.filters; f += DEPTH)
                    multiply<T>(image.data.data, pixels.data.data, some * n_pixels, filters.data.data + f,
                                std::min((int)DEPTH, of.filters - f), panel + (size_t)f * WIDTH, used,
                                sums.data + (size_t)tap * WIDTH, lines.data.data, false);
            }
            for (int b = 0; b < some; b++)
                for (int i = 0; i < of.y.in; i++)
                    turn<T>(sums.data + ((size_t)b * area + (of.y.before + i) * width + of.x.before) * WIDTH, WIDTH,
                            of.x.in, used,
                            images + (n + b) * of.image_in() + ((size_t)block * WIDTH * of.y.in + i) * of.x.in,
                            (npy_intp)of.y.in * of.x.in);
        }
    }
    return true;
}

// Returns whether an array has the given type and four sizes.
static bool has(PyArrayObject *array, int type, npy_intp n, npy_intp m, npy_intp height, npy_intp width) {
    const npy_intp sizes[] = {n, m, height, width};
    return PyArray_NDIM(array) == 4 && PyArray_TYPE(array) == type && PyArray_CompareLists(PyArray_DIMS(array), sizes, 4);
}

// Returns the number of bytes of scratch memory for one image.
template <typename T>
static size_t scratch_bytes(const Correlation &of, int direction) {
    enum { WIDTH = Kind<T>::WIDTH };
    size_t n = direction < 2 ? (size_t)of.channels * channel_step<T>(of.area()) +
                                   (size_t)rounded(of.filters, WIDTH) * of.channels * of.kernel()
                             : (size_t)of.filters * channel_step<T>(of.pixels()) +
                                   ((size_t)of.area() + of.last_tap() + 1) * WIDTH +
                                   (size_t)rounded(of.channels, WIDTH) * of.filters * of.kernel();
    return n * sizeof(T);
}

// Computes one array from the two others: top (direction 0), weights (1) or bottom (2). The computed array must be
// contiguous. Returns 1 on success, and -1 with an exception set on failure. Returns 0 to use Theano's code instead: if
// the sizes do not match or are too large, there is nothing to compute, memory is short, or scratch memory would take
// much more than copied windows.
template <typename T>
static int correlate_arrays(PyArrayObject *bottom, PyArrayObject *weights, PyArrayObject *top, int type, int direction,
                            Axis y, Axis x) {
    if (PyArray_NDIM(bottom) != 4 || PyArray_NDIM(weights) != 4) return 0;
    npy_intp n = PyArray_DIM(bottom, 0), channels = PyArray_DIM(bottom, 1), filters = PyArray_DIM(weights, 0);
    npy_intp sizes[] = {PyArray_DIM(bottom, 2), PyArray_DIM(bottom, 3), PyArray_DIM(weights, 2), PyArray_DIM(weights, 3)};
    const npy_intp most = 1 << 28, longest = 1 << 14;  // elements of an image, and of an axis; positions are ints
    for (int i = 0; i < 4; i++)
        if (sizes[i] < 1 || sizes[i] > longest) return 0;
    Axis *axes[] = {&y, &x};
    for (int i = 0; i < 2; i++) {
        Axis &axis = *axes[i];
        axis.in = sizes[i], axis.taps = sizes[2 + i];
        if (axis.before > longest || axis.behind > longest || axis.stride > longest || axis.dilation > longest) return 0;
        npy_intp room = (npy_intp)axis.in + axis.before + axis.behind - (npy_intp)(axis.taps - 1) * axis.dilation - 1;
        if (axis.before < 0 || axis.behind < 0 || room < 0) return 0;
        axis.out = room / axis.stride + 1;
    }
    npy_intp padded = (npy_intp)(y.before + y.in + y.behind) * (x.before + x.in + x.behind) + 64;
    npy_intp taps = (npy_intp)y.taps * x.taps, results = (npy_intp)y.out * x.out + 64;
    if (n < 1 || channels < 1 || filters < 1 || n >= most || channels >= most || filters >= most ||
        padded * channels >= most || results * filters >= most || taps * channels >= most || padded >= most / 4)
        return 0;
    Correlation of = {(int)n, (int)channels, (int)filters, y, x};
    if (!has(bottom, type, n, channels, y.in, x.in) || !has(weights, type, filters, channels, y.taps, x.taps) ||
        !has(top, type, n, filters, y.out, x.out))
        return 0;
    size_t windows = (size_t)of.channels * of.kernel() * of.pixels() * sizeof(T), scratch = scratch_bytes<T>(of, direction);
    if (scratch > windows && scratch > (size_t)1 << 26) return 0;
    PyArrayObject *arrays[] = {PyArray_GETCONTIGUOUS(bottom), PyArray_GETCONTIGUOUS(weights), PyArray_GETCONTIGUOUS(top)};
    bool good = arrays[0] && arrays[1] && arrays[2], done = false;
    if (good) {
        T *a = (T *)PyArray_DATA(arrays[0]), *b = (T *)PyArray_DATA(arrays[1]), *c = (T *)PyArray_DATA(arrays[2]);
        done = direction == 0   ? forward<T>(of, a, b, c)
               : direction == 1 ? weights_gradient<T>(of, a, b, c)
                                : images_gradient<T>(of, a, b, c);
    }
    for (int i = 0; i < 3; i++) Py_XDECREF(arrays[i]);
    return good ? done : -1;
}
}  // namespace synkhronos
#endif
