/* Linear layers as products of matrices: samples [batch][inputs] with a stride, weights [outputs][inputs].
 *
 * A tile is `rows` samples by COLUMNS outputs or vectors of inputs. The weights are read as they lie in the
 * caller's vector, each in one pass from the first row to the last; blocks of samples stay in the cache meanwhile.
 * Only the network's first layer may have a number of inputs that is no multiple of LANES.
 */

#define MOST_ROWS 6
#define ROWS (REGISTERS == 32 ? MOST_ROWS : 2)
#define COLUMNS 4
#define DOTS (REGISTERS == 32 ? 8 : 4)
#define BLOCK 1024
#define LINES 16  /* outputs at a time, by which an input's gradient is summed */

/* Calls `tile(first, rows)` for samples in equal shares of at most ROWS; the cases give it a constant. */
#define SHARE(batch, tile)                                                                                           \
    for (int share = 0, shares = ((batch) + ROWS - 1) / ROWS; share < shares; share++) {                             \
        const int first = share * (batch) / shares;                                                                  \
        switch ((share + 1) * (batch) / shares - first) {                                                            \
        case 1: tile(1); break;                                                                                      \
        case 2: tile(2); break;                                                                                      \
        case 3: tile(3); break;                                                                                      \
        case 4: tile(4); break;                                                                                      \
        case 5: tile(5); break;                                                                                      \
        case 6: tile(6); break;                                                                                      \
        }                                                                                                            \
    }

typedef struct {
    int inputs, outputs;
} Linear;

/* Products of one or two samples and at most DOTS outputs. */
KERNEL void dot_tile(const Linear s, const float *x, size_t stride, const float *weight, int inputs, float *y,
                     size_t y_stride, const int rows, const int columns)
{
    vec sum[2 * DOTS] = {0}, w[DOTS];
    float sums[2 * DOTS];
    int k = 0;
    for (; k + LANES <= inputs; k += LANES) {
        UNROLL
        for (int j = 0; j < columns; j++) {
            w[j] = load(weight + (size_t)j * s.inputs + k);
            IN_REGISTER(w[j]);
        }
        UNROLL
        for (int i = 0; i < rows; i++) {
            vec value = load(x + i * stride + k);
            IN_REGISTER(value);
            UNROLL
            for (int j = 0; j < columns; j++)
                sum[i * DOTS + j] += value * w[j];
        }
    }
    UNROLL
    for (int first = 0; first < 2 * DOTS; first += LANES)
        store(sums + first, sums_of_lanes(sum + first));
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++)
            y[i * y_stride + j] += sums[i * DOTS + j];
    if (s.inputs % LANES)
        for (; k < inputs; k++)
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < columns; j++)
                    y[i * y_stride + j] += x[i * stride + k] * weight[(size_t)j * s.inputs + k];
}

/* Adds the products of all samples and some outputs. */
KERNEL void dot_columns(const Linear s, int batch, const float *x, size_t stride, const float *weight, int inputs,
                        float *y, size_t y_stride, const int columns)
{
    int i = 0;
    for (; i + 2 <= batch; i += 2)
        dot_tile(s, x + i * stride, stride, weight, inputs, y + i * y_stride, y_stride, 2, columns);
    if (i < batch)
        dot_tile(s, x + i * stride, stride, weight, inputs, y + i * y_stride, y_stride, 1, columns);
}

KERNEL void linear_forward(const Linear s, int batch, const float *x, size_t stride, const float *weight,
                           const float *bias, float *y, size_t y_stride)
{
    for (int i = 0; i < batch; i++)
        memcpy(y + i * y_stride, bias, sizeof(float) * s.outputs);
    for (int k = 0; k < s.inputs; k += BLOCK) {
        const int inputs = k + BLOCK < s.inputs ? BLOCK : s.inputs - k;
        int j = 0;
        for (; j + DOTS <= s.outputs; j += DOTS)
            dot_columns(s, batch, x + k, stride, weight + (size_t)j * s.inputs + k, inputs, y + j, y_stride, DOTS);
        if (s.outputs % DOTS)
            dot_columns(s, batch, x + k, stride, weight + (size_t)j * s.inputs + k, inputs, y + j, y_stride,
                        s.outputs % DOTS);
    }
}

KERNEL void input_tile(const Linear s, const float *grad, size_t y_stride, const float *weight, int outputs,
                       float *grad_x, size_t stride, const int rows, const int vectors)
{
    vec sum[MOST_ROWS * COLUMNS], w[COLUMNS];
    UNROLL
    for (int i = 0; i < rows; i++)
        UNROLL
        for (int v = 0; v < vectors; v++)
            sum[i * COLUMNS + v] = load(grad_x + i * stride + v * LANES);
    for (int j = 0; j < outputs; j++) {
        UNROLL
        for (int v = 0; v < vectors; v++)
            w[v] = load(weight + (size_t)j * s.inputs + v * LANES);
        UNROLL
        for (int i = 0; i < rows; i++) {
            const vec value = spread(grad + i * y_stride + j);
            UNROLL
            for (int v = 0; v < vectors; v++)
                sum[i * COLUMNS + v] += value * w[v];
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++)
        UNROLL
        for (int v = 0; v < vectors; v++)
            store(grad_x + i * stride + v * LANES, sum[i * COLUMNS + v]);
}

/* Gradient by the layer's input. */
KERNEL void linear_input_gradient(const Linear s, int batch, const float *grad, size_t y_stride, const float *weight,
                                  float *grad_x, size_t stride)
{
    const int wide = COLUMNS * LANES;
    for (int i = 0; i < batch; i++)
        memset(grad_x + i * stride, 0, sizeof(float) * s.inputs);
    for (int block = 0; block < s.inputs; block += BLOCK)
        for (int j = 0; j < s.outputs; j += LINES) {
            const int outputs = j + LINES < s.outputs ? LINES : s.outputs - j;
            const int end = block + BLOCK < s.inputs ? block + BLOCK : s.inputs;
            int k = block;
#define TILE(rows)                                                                                                   \
    input_tile(s, grad + first * y_stride + j, y_stride, weight + (size_t)j * s.inputs + k, outputs,                 \
               grad_x + first * stride + k, stride, rows, vectors)
            for (; k + wide <= end; k += wide) {
                const int vectors = COLUMNS;
                SHARE(batch, TILE)
            }
            if (s.inputs % wide && k < end) {
                const int vectors = s.inputs % wide / LANES;
                SHARE(batch, TILE)
            }
#undef TILE
        }
}

KERNEL void weight_tile(int batch, const float *grad, size_t y_stride, const float *x, size_t stride,
                        float *grad_weight, size_t line, const int outputs, const int vectors)
{
    vec sum[MOST_ROWS * COLUMNS] = {0}, value[COLUMNS];
    for (int i = 0; i < batch; i++) {
        UNROLL
        for (int v = 0; v < vectors; v++)
            value[v] = load(x + i * stride + v * LANES);
        UNROLL
        for (int j = 0; j < outputs; j++) {
            const vec slope = spread(grad + i * y_stride + j);
            UNROLL
            for (int v = 0; v < vectors; v++)
                sum[j * COLUMNS + v] += slope * value[v];
        }
    }
    UNROLL
    for (int j = 0; j < outputs; j++)
        UNROLL
        for (int v = 0; v < vectors; v++)
            store(grad_weight + j * line + v * LANES, sum[j * COLUMNS + v]);
}

KERNEL void weight_lines(const Linear s, int batch, const float *grad, size_t y_stride, const float *x, size_t stride,
                         float *grad_weight, size_t line, int inputs, const int outputs)
{
    const int wide = COLUMNS * LANES;
    int k = 0;
    for (; k + wide <= inputs; k += wide)
        weight_tile(batch, grad, y_stride, x + k, stride, grad_weight + k, line, outputs, COLUMNS);
    if (s.inputs % wide && k < inputs)
        weight_tile(batch, grad, y_stride, x + k, stride, grad_weight + k, line, outputs, s.inputs % wide / LANES);
    if (s.inputs % LANES && inputs % LANES)
        for (k = inputs - inputs % LANES; k < inputs; k++)
            for (int j = 0; j < outputs; j++) {
                float sum = 0;
                for (int i = 0; i < batch; i++)
                    sum += grad[i * y_stride + j] * x[i * stride + k];
                grad_weight[j * line + k] = sum;
            }
}

/* Takes a finished part of the gradient, which is the caller's to overwrite: `count` entries from `start` on. */
typedef void Take(void *to, float *gradient, int64_t start, int64_t count);

/* Gradients by the layer's weights and bias. With `take`, those by the weights are not kept but taken line by line,
 * while they are in the cache; `start` is the first weight's entry. */
KERNEL void linear_weight_gradient(const Linear s, int batch, const float *grad, size_t y_stride, const float *x,
                                   size_t stride, float *grad_weight, float *grad_bias, Take *take, void *to,
                                   int64_t start)
{
    float lines[ROWS * BLOCK] ALIGNED;
    const size_t line = take ? BLOCK : s.inputs;
    for (int k = 0; k < s.inputs; k += BLOCK) {
        const int inputs = k + BLOCK < s.inputs ? BLOCK : s.inputs - k;
        for (int j = 0; j < s.outputs; j += ROWS) {
            const int64_t at = (int64_t)j * s.inputs + k;
            float *const place = take ? lines : grad_weight + at;
            const int rows = j + ROWS <= s.outputs ? ROWS : s.outputs % ROWS;
            if (rows == ROWS)
                weight_lines(s, batch, grad + j, y_stride, x + k, stride, place, line, inputs, ROWS);
            else
                weight_lines(s, batch, grad + j, y_stride, x + k, stride, place, line, inputs, s.outputs % ROWS);
            if (take)
                for (int row = 0; row < rows; row++)
                    take(to, lines + row * BLOCK, start + at + (int64_t)row * s.inputs, inputs);
        }
    }
    memset(grad_bias, 0, sizeof(float) * s.outputs);
    for (int i = 0; i < batch; i++)
        for (int j = 0; j < s.outputs; j++)
            grad_bias[j] += grad[i * y_stride + j];
}

/* ReLU of a hidden layer, and its dropout where there is a mask. */
KERNEL void relu_dropout(int count, float *y, const float *mask)
{
    for (int j = 0; j < count; j++) {
        const float value = y[j] < 0 ? 0 : y[j];
        y[j] = mask ? value * mask[j] : value;
    }
}

KERNEL void relu_dropout_gradient(int count, const float *y, const float *mask, float *grad)
{
    for (int j = 0; j < count; j++)
        grad[j] = y[j] <= 0 ? 0 : mask ? grad[j] * mask[j] : grad[j];
}
