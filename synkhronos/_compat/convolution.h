// Correlations of images with filters, and both gradients, without writing the windows of each image side by side first.
//
// All three are sums of one kind: over k, image[rows[r] + columns[k]] * panel[k][v]. A few rows r at a time, and vectors
// of neighbours v, are held in registers. Forward, rows are pixels of the output, columns are taps of the filters, and
// neighbours are filters. For the gradient with respect to the weights, rows and columns change places. For that with
// respect to the images, columns are filters, neighbours are channels, and the sums of each tap go where it has read.

namespace synkhronos {

#if defined(__AVX512F__)
enum { BYTES = 64, ROWS = 12 };
#elif defined(__AVX__)
enum { BYTES = 32, ROWS = 6 };
#else
enum { BYTES = 16, ROWS = 6 };
#endif
// Columns whose part of a panel stays in the first cache; pixels whose sums do.
enum { HALF = ROWS / 2, DEPTH = 256, CHUNK = 48 };

template <typename T, typename Integer>
struct Vectors {
    typedef T vector __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
    typedef Integer indexes __attribute__((vector_size(BYTES)));
    enum { LANES = BYTES / sizeof(T), WIDTH = 2 * LANES };  // a line of a panel has two vectors
};
template <typename T>
struct Kind;
template <>
struct Kind<npy_float> : Vectors<npy_float, npy_int32> {};
template <>
struct Kind<npy_double> : Vectors<npy_double, npy_int64> {};

static inline int rounded(int n, int step) { return (n + step - 1) / step * step; }

// Memory without values; `good` tells whether it could be had.
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

// Adds the sums of R rows over n columns to what is there, or puts them there: row r's to line lines[r].
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

// The same for many rows, of which there are a multiple of HALF; `used` neighbours of a line are wanted.
template <typename T>
static void multiply(const T *image, const int *rows, int n_rows, const int *columns, int n, const T *panel, int used,
                     T *sums, const int *lines, bool put) {
    bool both = used > Kind<T>::LANES;
    int r = 0;
    for (; r + ROWS <= n_rows; r += ROWS)
        (both ? add_up<T, ROWS, 2> : add_up<T, ROWS, 1>)(image, rows + r, columns, n, panel, sums, lines + r, put);
    if (r < n_rows)
        (both ? add_up<T, HALF, 2> : add_up<T, HALF, 1>)(image, rows + r, columns, n, panel, sums, lines + r, put);
}

// Turns a matrix around: to[j * to_step + i] = from[i * from_step + j].
template <typename T>
static void turn(const T *__restrict__ from, npy_intp from_step, int n, int m, T *__restrict__ to, npy_intp to_step) {
    enum { LANES = Kind<T>::LANES };
    int i = 0;
#if defined(__GNUC__) && !defined(__clang__)
    // Squares of LANES x LANES: each step exchanges halves of pairs of lines, quarters, and so on.
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

// One axis of a correlation: `in` elements with zeros before and behind, a filter of `taps` elements, `out` results.
struct Axis {
    int in, before, behind, taps, out, stride, dilation;
    bool fits() const {
        int last = (out - 1) * stride + (taps - 1) * dilation;
        return in > 0 && taps > 0 && out > 0 && before >= 0 && behind >= 0 && last < in + before + behind;
    }
};

// Images of several channels with zeros around them. The channels start at odd multiples of a cache line, for a power of
// two as a step between them would use few sets of the cache.
template <typename T>
struct Padded {
    int channels, height, width, step;
    const Axis &y, &x;
    Scratch<T> data;
    Padded(int channels, const Axis &y, const Axis &x)
        : channels(channels), height(y.before + y.in + y.behind), width(x.before + x.in + x.behind),
          step((rounded(height * width, 64 / sizeof(T)) / (64 / sizeof(T)) | 1) * (64 / sizeof(T))), y(y), x(x),
          data((size_t)channels * step) {
        if (data.data) memset(data.data, 0, sizeof(T) * channels * step);
    }
    void take(const T *image) {
        for (int c = 0; c < channels; c++)
            for (int i = 0; i < y.in; i++)
                memcpy(data.data + (size_t)c * step + (y.before + i) * width + x.before,
                       image + ((size_t)c * y.in + i) * x.in, sizeof(T) * x.in);
    }
};

// Positions in a padded image, with the last one repeated up to a multiple of HALF.
struct Positions {
    int n, padded;
    Scratch<int> data;
    explicit Positions(int most) : n(0), padded(0), data(most + HALF) {}
    void add(int position) { data[n++] = position; }
    void finish() {
        for (padded = n; padded % HALF; padded++) data[padded] = data[n - 1];
    }
};

// Line after line.
static bool add_lines(Positions &lines, int n) {
    if (!lines.data.data) return false;
    for (int i = 0; i < n; i++) lines.add(i);
    return true;
}

template <typename T>
static void add_pixels(Positions &pixels, const Padded<T> &image, const Axis &y, const Axis &x) {
    for (int i = 0; i < y.out; i++)
        for (int j = 0; j < x.out; j++) pixels.add(i * y.stride * image.width + j * x.stride);
    pixels.finish();
}

template <typename T>
static void add_taps(Positions &taps, const Padded<T> &image, const Axis &y, const Axis &x) {
    for (int c = 0; c < image.channels; c++)
        for (int i = 0; i < y.taps; i++)
            for (int j = 0; j < x.taps; j++)
                taps.add(c * image.step + i * y.dilation * image.width + j * x.dilation);
    taps.finish();
}

// One image's correlation with panels of filters, to `out`: [filter][pixel], a filter's pixels being `step` apart.
template <typename T>
static void correlate(const T *image, const Positions &pixels, const Positions &taps, const Positions &lines,
                      const T *panels, int filters, T *out, npy_intp step) {
    enum { WIDTH = Kind<T>::WIDTH };
    T tile[CHUNK * WIDTH] __attribute__((aligned(64)));
    for (int p = 0; p < pixels.n; p += CHUNK) {
        int some = std::min((int)CHUNK, pixels.n - p);
        for (int f = 0; f < filters; f += WIDTH) {
            int used = std::min((int)WIDTH, filters - f);
            const T *panel = panels + (size_t)f * taps.n;
            for (int k = 0; k < taps.n; k += DEPTH)
                multiply<T>(image, pixels.data.data + p, rounded(some, HALF), taps.data.data + k,
                            std::min((int)DEPTH, taps.n - k), panel + (size_t)k * WIDTH, used, tile, lines.data.data,
                            k == 0);
            turn<T>(tile, WIDTH, some, used, out + f * step + p, step);
        }
    }
}

struct Correlation {
    int images, channels, filters;
    Axis y, x;
    int kernel() const { return y.taps * x.taps; }
    int pixels_out() const { return y.out * x.out; }
    size_t image_in() const { return (size_t)channels * y.in * x.in; }
    size_t image_out() const { return (size_t)filters * pixels_out(); }
};

// The output of all images; false if there is no memory.
template <typename T>
static bool forward(const Correlation &of, const T *images, const T *weights, T *out) {
    enum { WIDTH = Kind<T>::WIDTH };
    int n_taps = of.channels * of.kernel();
    Padded<T> image(of.channels, of.y, of.x);
    Positions pixels(of.pixels_out()), taps(n_taps), lines(CHUNK);
    Scratch<T> panels((size_t)rounded(of.filters, WIDTH) * n_taps);
    if (!image.data.data || !pixels.data.data || !taps.data.data || !panels.data || !add_lines(lines, CHUNK)) return false;
    add_pixels(pixels, image, of.y, of.x);
    add_taps(taps, image, of.y, of.x);
    for (int f = 0; f < rounded(of.filters, WIDTH); f++)
        for (int k = 0; k < n_taps; k++)
            panels[(size_t)(f / WIDTH * WIDTH) * n_taps + (size_t)k * WIDTH + f % WIDTH] =
                f < of.filters ? weights[(size_t)f * n_taps + k] : T(0);
    for (int i = 0; i < of.images; i++) {
        image.take(images + i * of.image_in());
        correlate<T>(image.data.data, pixels, taps, lines, panels.data, of.filters, out + i * of.image_out(),
                     of.pixels_out());
    }
    return true;
}

// The gradient with respect to the weights: each image's sums are added to those of the images before it.
template <typename T>
static bool weights_gradient(const Correlation &of, const T *images, T *weights, const T *out) {
    enum { WIDTH = Kind<T>::WIDTH };
    int n_taps = of.channels * of.kernel(), n_pixels = of.pixels_out();
    Padded<T> image(of.channels, of.y, of.x);
    Positions pixels(n_pixels), taps(n_taps), lines(n_taps + HALF);
    Scratch<T> panel((size_t)n_pixels * WIDTH), sums((size_t)rounded(n_taps, HALF) * rounded(of.filters, WIDTH));
    if (!image.data.data || !pixels.data.data || !taps.data.data || !panel.data || !sums.data ||
        !add_lines(lines, rounded(n_taps, HALF)))
        return false;
    add_pixels(pixels, image, of.y, of.x);
    add_taps(taps, image, of.y, of.x);
    memset(panel.data, 0, sizeof(T) * n_pixels * WIDTH);
    for (int i = 0; i < of.images; i++) {
        image.take(images + i * of.image_in());
        for (int f = 0; f < of.filters; f += WIDTH) {
            int used = std::min((int)WIDTH, of.filters - f);
            turn<T>(out + i * of.image_out() + (size_t)f * n_pixels, n_pixels, used, n_pixels, panel.data, WIDTH);
            for (int p = 0; p < n_pixels; p += DEPTH)
                multiply<T>(image.data.data, taps.data.data, taps.padded, pixels.data.data + p,
                            std::min((int)DEPTH, n_pixels - p), panel.data + (size_t)p * WIDTH, used,
                            sums.data + (size_t)f * taps.padded, lines.data.data, i == 0 && p == 0);
        }
    }
    for (int f = 0; f < of.filters; f += WIDTH)
        turn<T>(sums.data + (size_t)f * taps.padded, WIDTH, n_taps, std::min((int)WIDTH, of.filters - f),
                weights + (size_t)f * n_taps, n_taps);
    return true;
}

// The gradient with respect to the images: each tap's sums over the filters go to the pixels that it has read. The lines
// of `sums` are the pixels of a padded image; WIDTH channels at a time lie in one.
template <typename T>
static bool images_gradient(const Correlation &of, T *images, const T *weights, const T *out) {
    enum { WIDTH = Kind<T>::WIDTH };
    int n_pixels = of.pixels_out(), blocks = rounded(of.channels, WIDTH) / WIDTH;
    int height = of.y.before + of.y.in + of.y.behind, width = of.x.before + of.x.in + of.x.behind, area = height * width;
    const Axis y = {of.y.out, 0, 0, 1, of.y.out, 1, 1}, x = {of.x.out, 0, 0, 1, of.x.out, 1, 1};
    Padded<T> image(of.filters, y, x);
    Positions pixels(n_pixels), lines(n_pixels), filters(of.filters);
    Scratch<T> panels((size_t)of.kernel() * blocks * of.filters * WIDTH), sums((size_t)2 * area * WIDTH);
    if (!image.data.data || !pixels.data.data || !lines.data.data || !filters.data.data || !panels.data || !sums.data)
        return false;
    add_pixels(pixels, image, y, x);
    for (int i = 0; i < of.y.out; i++)
        for (int j = 0; j < of.x.out; j++) lines.add(i * of.y.stride * width + j * of.x.stride);
    for (int i = n_pixels; i < pixels.padded; i++) lines.data[i] = area;  // where nobody reads
    for (int f = 0; f < of.filters; f++) filters.add(f * image.step);
    for (int k = 0; k < of.kernel(); k++)
        for (int f = 0; f < of.filters; f++)
            for (int c = 0; c < blocks * WIDTH; c++)
                panels[(((size_t)k * blocks + c / WIDTH) * of.filters + f) * WIDTH + c % WIDTH] =
                    c < of.channels ? weights[((size_t)f * of.channels + c) * of.kernel() + k] : T(0);
    for (int n = 0; n < of.images; n++) {
        image.take(out + n * of.image_out());
        for (int block = 0; block < blocks; block++) {
            int used = std::min((int)WIDTH, of.channels - block * WIDTH);
            memset(sums.data, 0, sizeof(T) * 2 * area * WIDTH);
            for (int k = 0; k < of.kernel(); k++) {
                const T *panel = panels.data + ((size_t)k * blocks + block) * of.filters * WIDTH;
                int tap = k / of.x.taps * of.y.dilation * width + k % of.x.taps * of.x.dilation;
                for (int f = 0; f < of.filters; f += DEPTH)
                    multiply<T>(image.data.data, pixels.data.data, pixels.padded, filters.data.data + f,
                                std::min((int)DEPTH, of.filters - f), panel + (size_t)f * WIDTH, used,
                                sums.data + (size_t)tap * WIDTH, lines.data.data, false);
            }
            for (int i = 0; i < of.y.in; i++)
                turn<T>(sums.data + ((size_t)(of.y.before + i) * width + of.x.before) * WIDTH, WIDTH, of.x.in, used,
                        images + n * of.image_in() + ((size_t)block * WIDTH * of.y.in + i) * of.x.in,
                        (npy_intp)of.y.in * of.x.in);
        }
    }
    return true;
}

// Whether an array has a type and four sizes.
static bool has(PyArrayObject *array, int type, npy_intp n, npy_intp m, npy_intp height, npy_intp width) {
    const npy_intp sizes[] = {n, m, height, width};
    return PyArray_NDIM(array) == 4 && PyArray_TYPE(array) == type && PyArray_CompareLists(PyArray_DIMS(array), sizes, 4);
}

// Computes the array that `direction` names (0: top, 1: weights, 2: bottom), which is contiguous, from the two others.
// Returns 1, or 0 where the sizes do not belong together or nothing is to be computed, or -1 with an exception.
template <typename T>
static int correlate_arrays(PyArrayObject *bottom, PyArrayObject *weights, PyArrayObject *top, int type, int direction,
                            Axis y, Axis x) {
    if (PyArray_NDIM(bottom) != 4 || PyArray_NDIM(weights) != 4) return 0;
    npy_intp n = PyArray_DIM(bottom, 0), channels = PyArray_DIM(bottom, 1), filters = PyArray_DIM(weights, 0);
    npy_intp sizes[] = {PyArray_DIM(bottom, 2), PyArray_DIM(bottom, 3), PyArray_DIM(weights, 2), PyArray_DIM(weights, 3)};
    const npy_intp most = 1 << 28;  // elements of an image, so that positions are ints
    for (int i = 0; i < 4; i++)
        if (sizes[i] < 1 || sizes[i] > 1 << 14) return 0;
    Axis *axes[] = {&y, &x};
    for (int i = 0; i < 2; i++) {
        Axis &axis = *axes[i];
        axis.in = sizes[i], axis.taps = sizes[2 + i];
        int room = axis.in + axis.before + axis.behind - (axis.taps - 1) * axis.dilation - 1;
        if (room < 0 || axis.before > 1 << 14 || axis.behind > 1 << 14) return 0;
        axis.out = room / axis.stride + 1;
        if (!axis.fits()) return 0;
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
    PyArrayObject *arrays[] = {PyArray_GETCONTIGUOUS(bottom), PyArray_GETCONTIGUOUS(weights), PyArray_GETCONTIGUOUS(top)};
    bool good = arrays[0] && arrays[1] && arrays[2];
    if (good) {
        T *a = (T *)PyArray_DATA(arrays[0]), *b = (T *)PyArray_DATA(arrays[1]), *c = (T *)PyArray_DATA(arrays[2]);
        good = direction == 0   ? forward<T>(of, a, b, c)
               : direction == 1 ? weights_gradient<T>(of, a, b, c)
                                : images_gradient<T>(of, a, b, c);
        if (!good) PyErr_NoMemory();
    }
    for (int i = 0; i < 3; i++) Py_XDECREF(arrays[i]);
    return good ? 1 : -1;
}
}  // namespace synkhronos
