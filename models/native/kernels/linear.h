/* Linear layers as products of matrices: samples [batch][inputs] with a stride, weights [outputs][inputs].
 *
 * A tile is `rows` samples by COLUMNS outputs or vectors of inputs. The weights are read as they lie in the
 * caller's vector, each in one pass from the first row to the last; blocks of samples stay in the cache meanwhile.
 * Only the network's first layer may have a number of inputs that is no multiple of LANES.
 */

#define MOST_ROWS 6
#define ROWS (REGISTERS == 32 ? MOST_ROWS : 2)
#define COLUMNS 4
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

KERNEL void dot_tile(const Linear s, const float *x, size_t stride, const float *weight, int inputs, float *y,
                     size_t y_stride, const int rows, const int columns)
{
    vec sum[MOST_ROWS * COLUMNS] = {0}, w[COLUMNS];
    int k = 0;
    for (; k + LANES <= inputs; k += LANES) {
        UNROLL
        for (int j = 0; j < columns; j++)
            w[j] = load(weight + (size_t)j * s.inputs + k);
        UNROLL
        for (int i = 0; i < rows; i++) {
            vec value = load(x + i * stride + k);
            IN_REGISTER(value);
            UNROLL
            for (int j = 0; j < columns; j++)
                sum[i * COLUMNS + j] += value * w[j];
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++)
        UNROLL
        for (int j = 0; j < columns; j++)
            y[i * y_stride + j] += sum_lanes(sum[i * COLUMNS + j]);
    if (s.inputs % LANES)
        for (; k < inputs; k++)
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < columns; j++)
                    y[i * y_stride + j] += x[i * stride + k] * weight[(size_t)j * s.inputs + k];
}

KERNEL void linear_forward(const Linear s, int batch, const float *x, size_t stride, const float *weight,
                           const float *bias, float *y, size_t y_stride)
{
    for (int i = 0; i < batch; i++)
        memcpy(y + i * y_stride, bias, sizeof(float) * s.outputs);
    for (int k = 0; k < s.inputs; k += BLOCK) {
        const int inputs = k + BLOCK < s.inputs ? BLOCK : s.inputs - k;
        int j = 0;
#define TILE(rows)                                                                                                   \
    dot_tile(s, x + first * stride + k, stride, weight + (size_t)j * s.inputs + k, inputs, y + first * y_stride + j, \
             y_stride, rows, columns)
        for (; j + COLUMNS <= s.outputs; j += COLUMNS) {
            const int columns = COLUMNS;
            SHARE(batch, TILE)
        }
        if (s.outputs % COLUMNS) {
            const int columns = s.outputs % COLUMNS;
            SHARE(batch, TILE)
        }
#undef TILE
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
        for (int i = 0; i < rows; i++)
            UNROLL
            for (int v = 0; v < vectors; v++)
                sum[i * COLUMNS + v] += grad[i * y_stride + j] * w[v];
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

KERNEL void weight_tile(const Linear s, int batch, const float *grad, size_t y_stride, const float *x, size_t stride,
                        float *grad_weight, const int outputs, const int vectors)
{
    vec sum[MOST_ROWS * COLUMNS] = {0}, value[COLUMNS];
    for (int i = 0; i < batch; i++) {
        UNROLL
        for (int v = 0; v < vectors; v++)
            value[v] = load(x + i * stride + v * LANES);
        UNROLL
        for (int j = 0; j < outputs; j++)
            UNROLL
            for (int v = 0; v < vectors; v++)
                sum[j * COLUMNS + v] += grad[i * y_stride + j] * value[v];
    }
    UNROLL
    for (int j = 0; j < outputs; j++)
        UNROLL
        for (int v = 0; v < vectors; v++)
            store(grad_weight + (size_t)j * s.inputs + v * LANES, sum[j * COLUMNS + v]);
}

KERNEL void weight_lines(const Linear s, int batch, const float *grad, size_t y_stride, const float *x, size_t stride,
                         float *grad_weight, int inputs, const int outputs)
{
    const int wide = COLUMNS * LANES;
    int k = 0;
    for (; k + wide <= inputs; k += wide)
        weight_tile(s, batch, grad, y_stride, x + k, stride, grad_weight + k, outputs, COLUMNS);
    if (s.inputs % wide && k < inputs)
        weight_tile(s, batch, grad, y_stride, x + k, stride, grad_weight + k, outputs, s.inputs % wide / LANES);
    if (s.inputs % LANES && inputs % LANES)
        for (k = inputs - inputs % LANES; k < inputs; k++)
            for (int j = 0; j < outputs; j++) {
                float sum = 0;
                for (int i = 0; i < batch; i++)
                    sum += grad[i * y_stride + j] * x[i * stride + k];
                grad_weight[(size_t)j * s.inputs + k] = sum;
            }
}

/* Gradients by the layer's weights and bias. */
KERNEL void linear_weight_gradient(const Linear s, int batch, const float *grad, size_t y_stride, const float *x,
                                   size_t stride, float *grad_weight, float *grad_bias)
{
    for (int k = 0; k < s.inputs; k += BLOCK) {
        const int inputs = k + BLOCK < s.inputs ? BLOCK : s.inputs - k;
        int j = 0;
        for (; j + ROWS <= s.outputs; j += ROWS)
            weight_lines(s, batch, grad + j, y_stride, x + k, stride, grad_weight + (size_t)j * s.inputs + k, inputs,
                         ROWS);
        if (s.outputs % ROWS)
            weight_lines(s, batch, grad + j, y_stride, x + k, stride, grad_weight + (size_t)j * s.inputs + k, inputs,
                         s.outputs % ROWS);
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
