/* A convolution forward in fewer products: F(4x4, 3x3) and F(2x2, 5x5) of Winograd's minimal filtering (Lavin and
 * Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016).
 *
 * A patch of 6x6 inputs and a kernel are both read as polynomials and evaluated at 6x6 points, where the convolution
 * is one product each: 36 for 16 outputs instead of 144, or for 4 outputs instead of 100. Along each axis the points are
 * 0, +-sqrt(1/2), +-sqrt(2) and infinity: these round about twice as coarsely as the plain sum, the usual 0, +-1, +-2
 * and infinity five times.
 */

#define SIDE 6
#define POINTS (SIDE * SIDE)
#define STEP(s) (SIDE + 1 - s.kernel) /* outputs in a row of a tile */
#define ROOT_HALF 0.70710678f
#define ROOT_2 1.41421356f

KERNEL void evaluate_inputs(vec *d, const int stride)
{
    const vec d0 = d[0], d1 = d[stride], d2 = d[2 * stride], d3 = d[3 * stride], d4 = d[4 * stride];
    const vec even_a = d4 - 2 * d2, odd_a = ROOT_HALF * (d3 - 2 * d1);
    const vec even_b = d4 - 0.5f * d2, odd_b = ROOT_2 * (d3 - 0.5f * d1);
    d[0] = d0 - 2.5f * d2 + d4;
    d[stride] = even_a + odd_a;
    d[2 * stride] = even_a - odd_a;
    d[3 * stride] = even_b + odd_b;
    d[4 * stride] = even_b - odd_b;
    d[5 * stride] += d1 - 2.5f * d3;
}

KERNEL void evaluate_kernel(const vec *g, const int stride, const int kernel, vec *u, const int u_stride)
{
    vec even_a = g[0] + 0.5f * g[2 * stride], odd_a = g[stride];
    vec even_b = g[0] + 2 * g[2 * stride], odd_b = g[stride];
    if (kernel == 5) {
        even_a += 0.25f * g[4 * stride], odd_a += 0.5f * g[3 * stride];
        even_b += 4 * g[4 * stride], odd_b += 2 * g[3 * stride];
    }
    odd_a *= ROOT_HALF, odd_b *= ROOT_2;
    u[0] = g[0];
    u[u_stride] = (even_a + odd_a) * (-2 / 3.f);
    u[2 * u_stride] = (even_a - odd_a) * (-2 / 3.f);
    u[3 * u_stride] = (even_b + odd_b) * (1 / 6.f);
    u[4 * u_stride] = (even_b - odd_b) * (1 / 6.f);
    u[5 * u_stride] = g[(kernel - 1) * stride];
}

KERNEL void interpolate(const vec *p, const int stride, const int step, vec *y, const int y_stride)
{
    const vec sum_a = p[stride] + p[2 * stride], difference_a = ROOT_HALF * (p[stride] - p[2 * stride]);
    const vec sum_b = p[3 * stride] + p[4 * stride], difference_b = ROOT_2 * (p[3 * stride] - p[4 * stride]);
    y[0] = p[0] + sum_a + sum_b;
    y[y_stride] = difference_a + difference_b;
    if (step == 4) {
        y[2 * y_stride] = 0.5f * sum_a + 2 * sum_b;
        y[3 * y_stride] = 0.5f * difference_a + 2 * difference_b;
    }
    y[(step - 1) * y_stride] += p[5 * stride];
}

/* Weights as packed for the forward kernel, [tap][channel][output], at all points: [point][channel][output]. */
KERNEL void winograd_weights(const Conv s, const float *packed, float *points)
{
    const int plane = s.inputs * s.outputs;
    for (int at = 0; at < plane; at += LANES) {
        vec g[25], half[SIDE * 5], u[POINTS];
        UNROLL
        for (int tap = 0; tap < s.kernel * s.kernel; tap++)
            g[tap] = load(packed + tap * plane + at);
        UNROLL
        for (int i = 0; i < s.kernel; i++)
            evaluate_kernel(g + i, s.kernel, s.kernel, half + i, s.kernel);
        UNROLL
        for (int i = 0; i < SIDE; i++)
            evaluate_kernel(half + i * s.kernel, 1, s.kernel, u + i * SIDE, 1);
        UNROLL
        for (int point = 0; point < POINTS; point++)
            store(points + point * plane + at, u[point]);
    }
}

/* One tile of inputs at all points: [point][tile][channel]. */
KERNEL void winograd_inputs(const Conv s, const float *x, float *points, const int tiles)
{
    for (int c = 0; c < s.inputs; c += LANES) {
        vec d[POINTS];
        UNROLL
        for (int i = 0; i < POINTS; i++)
            d[i] = load(x + i / SIDE * s.x_row + i % SIDE * s.x_pixel + c);
        UNROLL
        for (int i = 0; i < SIDE; i++)
            evaluate_inputs(d + i, SIDE);
        UNROLL
        for (int i = 0; i < SIDE; i++)
            evaluate_inputs(d + i * SIDE, 1);
        UNROLL
        for (int i = 0; i < POINTS; i++)
            store(points + i * tiles * s.inputs + c, d[i]);
    }
}

/* One tile of outputs from its points [point][tile][output]. */
KERNEL void winograd_outputs(const Conv s, const float *points, const float *bias, float *y, const int tiles)
{
    for (int o = 0; o < s.outputs; o += LANES) {
        vec p[POINTS], half[4 * SIDE], out[4 * 4];
        UNROLL
        for (int i = 0; i < POINTS; i++)
            p[i] = load(points + i * tiles * s.outputs + o);
        UNROLL
        for (int i = 0; i < SIDE; i++)
            interpolate(p + i, SIDE, STEP(s), half + i, SIDE);
        UNROLL
        for (int i = 0; i < STEP(s); i++)
            interpolate(half + i * SIDE, 1, STEP(s), out + i * STEP(s), 1);
        const vec b = load(bias + o);
        UNROLL
        for (int i = 0; i < STEP(s) * STEP(s); i++)
            store(y + (i / STEP(s) * s.width + i % STEP(s)) * s.outputs + o, out[i] + b);
    }
}

KERNEL void winograd_tile(const Conv s, const float *x, const float *weight, float *y, const int tiles)
{
    vec sum[REGISTERS] = {0}, w[REGISTERS];
    for (int c = 0; c < s.inputs; c++) {
        UNROLL
        for (int v = 0; v < s.vectors; v++)
            w[v] = load(weight + c * s.outputs + v * LANES);
        UNROLL
        for (int i = 0; i < tiles; i++)
            UNROLL
            for (int v = 0; v < s.vectors; v++)
                sum[i * s.vectors + v] += x[i * s.inputs + c] * w[v];
    }
    UNROLL
    for (int i = 0; i < tiles; i++)
        UNROLL
        for (int v = 0; v < s.vectors; v++)
            store(y + i * s.outputs + v * LANES, sum[i * s.vectors + v]);
}

/* At every point, the product of `tiles` tiles [tile][channel] and the weights. */
KERNEL void winograd_products(const Conv s, const float *x, const float *weight, float *y, const int tiles)
{
    for (int point = 0; point < POINTS; point++) {
        for (int o = 0; o < s.outputs; o += s.vectors * LANES) {
            int tile = 0;
            for (; tile + s.pixels <= tiles; tile += s.pixels)
                winograd_tile(s, x + tile * s.inputs, weight + o, y + tile * s.outputs + o, s.pixels);
            if (tiles % s.pixels)
                winograd_tile(s, x + tile * s.inputs, weight + o, y + tile * s.outputs + o, tiles % s.pixels);
        }
        x += tiles * s.inputs;
        weight += s.inputs * s.outputs;
        y += tiles * s.outputs;
    }
}

/* One image through the layer, `s.rows` rows of outputs at a time. */
KERNEL void winograd_forward(const Conv s, const float *x, const float *weight, const float *bias, float *x_points,
                             float *y_points, float *rows, float *y, uint64_t *alive)
{
    const int in_row = s.width / STEP(s), tiles = s.rows / STEP(s) * in_row, pooled = s.width / s.window;
    for (int row = 0; row < s.height; row += s.rows) {
        for (int i = 0; i < tiles; i++)
            winograd_inputs(s, x + (row + i / in_row * STEP(s)) * s.x_row + i % in_row * STEP(s) * s.x_pixel,
                            x_points + i * s.inputs, tiles);
        winograd_products(s, x_points, weight, y_points, tiles);
        for (int i = 0; i < tiles; i++)
            winograd_outputs(s, y_points + i * s.outputs, bias,
                             rows + (i / in_row * s.width + i % in_row) * STEP(s) * s.outputs, tiles);
        for (int part = 0; part < s.rows; part += s.window)
            relu_pool(s, rows + part * s.width * s.outputs, y + (row + part) / s.window * s.y_row,
                      alive + (row + part) / s.window * pooled * CORNERS(s) * WORDS(s));
    }
}
