/* A convolution in fewer products: F(4x4, 3x3) and F(4x4, 5x5) of Winograd's minimal filtering (Lavin and
 * Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016).
 *
 * A patch of inputs and a kernel are both read as polynomials and evaluated at as many points as the patch has pixels,
 * where the convolution is one product each: for 16 outputs 36 instead of 144, or 64 instead of 400. Along each axis
 * the points are 0, infinity and pairs of opposite roots. With +-sqrt(1/2) and +-sqrt(2), results round about twice as
 * coarsely as the plain sum; with +-1/2, +-1 and +-2, six times.
 */

#define STEP 4 /* outputs in a row of a tile */
#define SIDE(s) (STEP + s.kernel - 1)
#define POINTS(s) (SIDE(s) * SIDE(s))
#define MOST_SIDE 8
#define PAIRS(s) (SIDE(s) / 2 - 1)
/* Floats from one point to the next. Without the pad, all points of a tile were in one set of the cache. */
#define PAD 16
#define WEIGHT_PLANE(s) (s.inputs * s.outputs + PAD)

/* A pair of roots; sum and product of the squares of the other pairs, where one pair's product with none is 0; the
 * kernel's factor: 1 by the product of the root's distances from all others. */
typedef struct {
    float root, sum, product, factor;
} Pair;
static const Pair PAIRS_3[] = {{0.70710678f, 2, 0, -2 / 3.f}, {1.41421356f, 0.5f, 0, 1 / 6.f}};
static const Pair PAIRS_5[] = {{0.5f, 5, 4, 32 / 45.f}, {1, 4.25f, 1, -2 / 9.f}, {2, 1.25f, 0.25f, 1 / 90.f}};
#define PAIR(s, i) (s.kernel == 3 ? PAIRS_3[i] : PAIRS_5[i])

KERNEL void evaluate_inputs(const Conv s, const vec *d, vec *at, const int stride)
{
    const int top = SIDE(s) - 2;
    UNROLL
    for (int i = 0; i < PAIRS(s); i++) {
        const Pair pair = PAIR(s, i);
        vec even = d[top] - pair.sum * d[top - 2], odd = d[top - 1] - pair.sum * d[top - 3];
        if (s.kernel == 5)
            even += pair.product * d[2], odd += pair.product * d[1];
        at[(2 * i + 1) * stride] = even + pair.root * odd;
        at[(2 * i + 2) * stride] = even - pair.root * odd;
    }
    if (s.kernel == 3) {
        at[0] = d[0] - 2.5f * d[2] + d[4];
        at[5 * stride] = d[5] + d[1] - 2.5f * d[3];
    } else {
        at[0] = d[0] - d[6] + 5.25f * (d[4] - d[2]);
        at[7 * stride] = d[7] - d[1] + 5.25f * (d[3] - d[5]);
    }
}

KERNEL void evaluate_kernel(const Conv s, const vec *g, const int stride, vec *u)
{
    UNROLL
    for (int i = 0; i < PAIRS(s); i++) {
        const Pair pair = PAIR(s, i);
        const float square = pair.root * pair.root;
        vec even = g[0] + square * g[2 * stride], odd = g[stride];
        if (s.kernel == 5)
            even += square * square * g[4 * stride], odd += square * g[3 * stride];
        u[2 * i + 1] = (even + pair.root * odd) * pair.factor;
        u[2 * i + 2] = (even - pair.root * odd) * pair.factor;
    }
    u[0] = g[0];
    u[SIDE(s) - 1] = g[(s.kernel - 1) * stride];
}

KERNEL void interpolate(const Conv s, const vec *p, vec *y, const int stride)
{
    vec out[STEP] = {p[0], {0}, {0}, p[SIDE(s) - 1]};
    UNROLL
    for (int i = 0; i < PAIRS(s); i++) {
        const float root = PAIR(s, i).root;
        const vec sum = p[2 * i + 1] + p[2 * i + 2], difference = root * (p[2 * i + 1] - p[2 * i + 2]);
        out[0] += sum;
        out[1] += difference;
        out[2] += root * root * sum;
        out[3] += root * root * difference;
    }
    UNROLL
    for (int i = 0; i < STEP; i++)
        y[i * stride] = out[i];
}

/* Weights [output][channel][tap] at all points: forward [point][channel][output], else [point][output][channel]. */
KERNEL void winograd_weights(const Conv s, const float *weight, float *points, const int forward)
{
    const int taps = s.kernel * s.kernel;
    for (int o = 0; o < s.outputs; o += forward ? LANES : 1)
        for (int c = 0; c < s.inputs; c += forward ? 1 : LANES) {
            vec g[25], half[5 * MOST_SIDE], u[MOST_SIDE];
            for (int tap = 0; tap < taps; tap++)
                for (int lane = 0; lane < LANES; lane++)
                    g[tap][lane] = weight[(o * s.inputs + c + lane * (forward ? s.inputs : 1)) * taps + tap];
            for (int i = 0; i < s.kernel; i++)
                evaluate_kernel(s, g + i, s.kernel, half + i * SIDE(s));
            for (int i = 0; i < SIDE(s); i++) {
                evaluate_kernel(s, half + i, SIDE(s), u);
                UNROLL
                for (int j = 0; j < SIDE(s); j++)
                    store(points + (i * SIDE(s) + j) * WEIGHT_PLANE(s) + (forward ? c * s.outputs + o : o * s.inputs + c),
                          u[j]);
            }
        }
}

/* One tile of inputs at all points: [point][tile][channel]. */
KERNEL void winograd_inputs(const Conv s, const float *x, float *points, const size_t plane)
{
    for (int c = 0; c < s.inputs; c += LANES) {
        vec d[MOST_SIDE], half[MOST_SIDE * MOST_SIDE];
        for (int i = 0; i < SIDE(s); i++) {
            UNROLL
            for (int j = 0; j < SIDE(s); j++)
                d[j] = load(x + j * s.x_row + i * s.x_pixel + c);
            evaluate_inputs(s, d, half + i, SIDE(s));
        }
        for (int i = 0; i < SIDE(s); i++) {
            evaluate_inputs(s, half + i * SIDE(s), d, 1);
            UNROLL
            for (int j = 0; j < SIDE(s); j++)
                store(points + (i * SIDE(s) + j) * plane + c, d[j]);
        }
    }
}

/* One tile of outputs from its points [point][tile][output]. */
KERNEL void winograd_outputs(const Conv s, const float *points, const float *bias, float *y, const size_t plane)
{
    for (int o = 0; o < s.outputs; o += LANES) {
        vec p[MOST_SIDE], half[STEP * MOST_SIDE], out[STEP];
        for (int i = 0; i < SIDE(s); i++) {
            UNROLL
            for (int j = 0; j < SIDE(s); j++)
                p[j] = load(points + (i * SIDE(s) + j) * plane + o);
            interpolate(s, p, half + i, SIDE(s));
        }
        const vec b = load(bias + o);
        for (int i = 0; i < STEP; i++) {
            interpolate(s, half + i * SIDE(s), out, 1);
            UNROLL
            for (int j = 0; j < STEP; j++)
                store(y + (j * s.width + i) * s.outputs + o, out[j] + b);
        }
    }
}

KERNEL void winograd_tile(const float *x, const int inputs, const float *weight, const int outputs, float *y,
                          const int tiles, const int vectors)
{
    vec sum[REGISTERS] = {0}, w[REGISTERS];
    for (int c = 0; c < inputs; c++) {
        UNROLL
        for (int v = 0; v < vectors; v++)
            w[v] = load(weight + c * outputs + v * LANES);
        UNROLL
        for (int i = 0; i < tiles; i++) {
            const vec value = spread(x + i * inputs + c);
            UNROLL
            for (int v = 0; v < vectors; v++)
                sum[i * vectors + v] += value * w[v];
        }
    }
    UNROLL
    for (int i = 0; i < tiles; i++)
        UNROLL
        for (int v = 0; v < vectors; v++)
            store(y + i * outputs + v * LANES, sum[i * vectors + v]);
}

KERNEL void winograd_tiles(const float *x, const int inputs, const float *weight, const int outputs, float *y,
                           const int tiles, const int at_once, const int vectors)
{
    for (int o = 0; o < outputs; o += vectors * LANES) {
        int tile = 0;
        for (; tile + at_once <= tiles; tile += at_once)
            winograd_tile(x + tile * inputs, inputs, weight + o, outputs, y + tile * outputs + o, at_once, vectors);
        if (tiles % at_once)
            winograd_tile(x + tile * inputs, inputs, weight + o, outputs, y + tile * outputs + o, tiles % at_once,
                          vectors);
    }
}

/* At every point, the product of `tiles` tiles [tile][input] of each image and the weights [input][output]. */
KERNEL void winograd_products(const Conv s, int images, const float *x, const int inputs, const float *weight,
                              const int outputs, float *y, const int tiles)
{
    const int shared = outputs / LANES % 4 ? outputs / LANES % 2 ? 1 : 2 : 4;
    const int vectors = shared < s.vectors ? shared : s.vectors, at_once = s.pixels * s.vectors / vectors;
    const int most = at_once > tiles && s.rows == s.height ? at_once / tiles : 1; /* images at once */
    for (int point = 0; point < POINTS(s); point++, x += PAD, y += PAD, weight += WEIGHT_PLANE(s)) {
        int image = 0;
        for (; image + most <= images; image += most, x += most * tiles * inputs, y += most * tiles * outputs)
            winograd_tiles(x, inputs, weight, outputs, y, most * tiles, at_once, vectors);
        if (most > 1)
            for (; image < images; image++, x += tiles * inputs, y += tiles * outputs)
                winograd_tiles(x, inputs, weight, outputs, y, tiles, at_once, vectors);
    }
}

/* The inputs of images at all points, `s.rows` rows of outputs from `row` on. */
KERNEL void winograd_patches(const Conv s, int images, const float *x, size_t x_stride, int row, float *x_points)
{
    const int in_row = s.width / STEP, tiles = s.rows / STEP * in_row;
    for (int i = 0; i < images * tiles; i++)
        winograd_inputs(s, x + i / tiles * x_stride + (row + i % tiles / in_row * STEP) * s.x_row +
                        i % tiles % in_row * STEP * s.x_pixel, x_points + i * s.inputs,
                        images * tiles * s.inputs + PAD);
}

/* Images through the layer, `s.rows` rows of outputs at a time; from one image to the next are as many floats as the
 * strides say. */
KERNEL void winograd_forward(const Conv s, int images, const float *x, size_t x_stride, const float *weight,
                             const float *bias, float *x_points, float *y_points, float *rows, float *y,
                             size_t y_stride, uint64_t *alive, size_t alive_stride)
{
    const int in_row = s.width / STEP, tiles = s.rows / STEP * in_row, pooled = s.width / s.window;
    for (int row = 0; row < s.height; row += s.rows) {
        winograd_patches(s, images, x, x_stride, row, x_points);
        winograd_products(s, images, x_points, s.inputs, weight, s.outputs, y_points, tiles);
        for (int image = 0; image < images; image++) {
            for (int i = 0; i < tiles; i++)
                winograd_outputs(s, y_points + (image * tiles + i) * s.outputs, bias,
                                 rows + (i / in_row * s.width + i % in_row) * STEP * s.outputs,
                                 images * tiles * s.outputs + PAD);
            for (int part = 0; part < s.rows; part += s.window)
                relu_pool(s, rows + part * s.width * s.outputs,
                          y + image * y_stride + (row + part) / s.window * s.y_row,
                          alive + image * alive_stride + (row + part) / s.window * pooled * CORNERS(s) * WORDS(s));
        }
    }
}

/* The transposes of the evaluations, for the gradients: what is evaluated there is read here. */
KERNEL void evaluate_slopes(const Conv s, const vec *y, vec *at, const int stride)
{
    at[0] = y[0];
    at[(SIDE(s) - 1) * stride] = y[3];
    UNROLL
    for (int i = 0; i < PAIRS(s); i++) {
        const float root = PAIR(s, i).root;
        const vec even = y[0] + root * root * y[2], odd = root * (y[1] + root * root * y[3]);
        at[(2 * i + 1) * stride] = even + odd;
        at[(2 * i + 2) * stride] = even - odd;
    }
}

KERNEL void restore_inputs(const Conv s, const vec *at, vec *d, const int stride)
{
    const int top = SIDE(s) - 2;
    vec out[MOST_SIDE] = {0};
    UNROLL
    for (int i = 0; i < PAIRS(s); i++) {
        const Pair pair = PAIR(s, i);
        const vec even = at[2 * i + 1] + at[2 * i + 2], odd = pair.root * (at[2 * i + 1] - at[2 * i + 2]);
        out[top] += even, out[top - 2] -= pair.sum * even;
        out[top - 1] += odd, out[top - 3] -= pair.sum * odd;
        if (s.kernel == 5)
            out[2] += pair.product * even, out[1] += pair.product * odd;
    }
    const vec first = at[0], last = at[SIDE(s) - 1];
    out[0] += first, out[top + 1] += last;
    if (s.kernel == 3) {
        out[2] -= 2.5f * first, out[4] += first;
        out[3] -= 2.5f * last, out[1] += last;
    } else {
        out[2] -= 5.25f * first, out[4] += 5.25f * first, out[6] -= first;
        out[5] -= 5.25f * last, out[3] += 5.25f * last, out[1] -= last;
    }
    UNROLL
    for (int i = 0; i < SIDE(s); i++)
        d[i * stride] = out[i];
}

KERNEL void restore_kernel(const Conv s, const vec *u, vec *g, const int stride)
{
    vec out[5] = {u[0]};
    UNROLL
    for (int i = 0; i < PAIRS(s); i++) {
        const Pair pair = PAIR(s, i);
        const float square = pair.root * pair.root;
        const vec even = pair.factor * (u[2 * i + 1] + u[2 * i + 2]);
        const vec odd = pair.root * pair.factor * (u[2 * i + 1] - u[2 * i + 2]);
        out[0] += even, out[1] += odd, out[2] += square * even;
        if (s.kernel == 5)
            out[3] += square * odd, out[4] += square * square * even;
    }
    out[s.kernel - 1] += u[SIDE(s) - 1];
    UNROLL
    for (int i = 0; i < s.kernel; i++)
        g[i * stride] = out[i];
}

/* One tile of the outputs' gradient at all points. */
KERNEL void winograd_slopes(const Conv s, const float *y, float *points, const size_t plane)
{
    for (int o = 0; o < s.outputs; o += LANES) {
        vec slopes[STEP], half[MOST_SIDE * STEP], at[MOST_SIDE];
        for (int i = 0; i < STEP; i++) {
            UNROLL
            for (int j = 0; j < STEP; j++)
                slopes[j] = load(y + (j * s.width + i) * s.outputs + o);
            evaluate_slopes(s, slopes, half + i, STEP);
        }
        for (int i = 0; i < SIDE(s); i++) {
            evaluate_slopes(s, half + i * STEP, at, 1);
            UNROLL
            for (int j = 0; j < SIDE(s); j++)
                store(points + (i * SIDE(s) + j) * plane + o, at[j]);
        }
    }
}

/* Adds one tile's gradient by its inputs. */
KERNEL void winograd_restore(const Conv s, const float *points, float *grad_x, const size_t plane)
{
    for (int c = 0; c < s.inputs; c += LANES) {
        vec at[MOST_SIDE], half[MOST_SIDE * MOST_SIDE];
        for (int i = 0; i < SIDE(s); i++) {
            UNROLL
            for (int j = 0; j < SIDE(s); j++)
                at[j] = load(points + (i * SIDE(s) + j) * plane + c);
            restore_inputs(s, at, half + i, SIDE(s));
        }
        for (int i = 0; i < SIDE(s); i++) {
            restore_inputs(s, half + i * SIDE(s), at, 1);
            UNROLL
            for (int j = 0; j < SIDE(s); j++) {
                float *const to = grad_x + j * s.x_row + i * s.x_pixel + c;
                store(to, load(to) + at[j]);
            }
        }
    }
}

#define LINE_UP (REGISTERS == 32 ? 4 : 2)

/* At every point, the products of all tiles' inputs and gradients, added to [point][channel][output] or, if they are
 * the first, stored there. */
KERNEL void winograd_sums(const Conv s, int tiles, const float *x, const float *y, float *sums, const int first)
{
    for (int point = 0; point < POINTS(s); point++, sums += WEIGHT_PLANE(s)) {
        for (int c = 0; c < s.inputs; c += LINE_UP)
            for (int o = 0; o < s.outputs; o += s.vectors * LANES) {
                vec sum[LINE_UP * 4] = {0}, slope[4];
                float *const to = sums + c * s.outputs + o;
                if (!first)
                    UNROLL
                    for (int i = 0; i < LINE_UP * s.vectors; i++)
                        sum[i] = load(to + i / s.vectors * s.outputs + i % s.vectors * LANES);
                for (int tile = 0; tile < tiles; tile++) {
                    UNROLL
                    for (int v = 0; v < s.vectors; v++) {
                        slope[v] = load(y + tile * s.outputs + o + v * LANES);
                        IN_REGISTER(slope[v]);
                    }
                    UNROLL
                    for (int i = 0; i < LINE_UP; i++) {
                        const vec value = spread(x + tile * s.inputs + c + i);
                        UNROLL
                        for (int v = 0; v < s.vectors; v++)
                            sum[i * s.vectors + v] += value * slope[v];
                    }
                }
                UNROLL
                for (int i = 0; i < LINE_UP * s.vectors; i++)
                    store(to + i / s.vectors * s.outputs + i % s.vectors * LANES, sum[i]);
            }
        x += tiles * s.inputs + PAD;
        y += tiles * s.outputs + PAD;
    }
}

/* The gradient by the weights [output][channel][tap], from its sums at all points. */
KERNEL void winograd_weight_gradient(const Conv s, const float *sums, float *grad_weight)
{
    const int taps = s.kernel * s.kernel;
    for (int o = 0; o < s.outputs; o += LANES)
        for (int c = 0; c < s.inputs; c++) {
            vec u[MOST_SIDE], half[5 * MOST_SIDE], g[25];
            for (int i = 0; i < SIDE(s); i++) {
                UNROLL
                for (int j = 0; j < SIDE(s); j++)
                    u[j] = load(sums + (i * SIDE(s) + j) * WEIGHT_PLANE(s) + c * s.outputs + o);
                restore_kernel(s, u, half + i, SIDE(s));
            }
            for (int i = 0; i < s.kernel; i++)
                restore_kernel(s, half + i * SIDE(s), g + i, s.kernel);
            for (int lane = 0; lane < LANES; lane++)
                for (int tap = 0; tap < taps; tap++)
                    grad_weight[((o + lane) * s.inputs + c) * taps + tap] = g[tap][lane];
        }
}

/* Images back through the layer: the sums for the weights' gradient, and, with `grad_x`, the gradient by the padded
 * input, which starts as zeros. */
KERNEL void winograd_backward(const Conv s, int images, const float *x, size_t x_stride, const uint64_t *alive,
                              size_t alive_stride, const float *grad, size_t grad_stride, const float *weight,
                              float *x_points, float *y_points, float *rows, float *sums, int first, float *grad_x,
                              size_t grad_x_stride)
{
    const int in_row = s.width / STEP, tiles = s.rows / STEP * in_row, pooled = s.width / s.window;
    for (int row = 0; row < s.height; row += s.rows) {
        winograd_patches(s, images, x, x_stride, row, x_points);
        for (int image = 0; image < images; image++) {
            for (int part = 0; part < s.rows; part += s.window)
                unpool(s, grad + image * grad_stride + (row + part) / s.window * s.y_row,
                       alive + image * alive_stride + (row + part) / s.window * pooled * CORNERS(s) * WORDS(s),
                       rows + part * s.width * s.outputs);
            for (int i = 0; i < tiles; i++)
                winograd_slopes(s, rows + (i / in_row * s.width + i % in_row) * STEP * s.outputs,
                                y_points + (image * tiles + i) * s.outputs, images * tiles * s.outputs + PAD);
        }
        winograd_sums(s, images * tiles, x_points, y_points, sums, first && row == 0);
        if (!grad_x)
            continue;
        winograd_products(s, images, y_points, s.outputs, weight, s.inputs, x_points, tiles);
        for (int i = 0; i < images * tiles; i++)
            winograd_restore(s, x_points + i * s.inputs, grad_x + i / tiles * grad_x_stride +
                             (row + i % tiles / in_row * STEP) * s.x_row + i % tiles % in_row * STEP * s.x_pixel,
                             images * tiles * s.inputs + PAD);
    }
}
