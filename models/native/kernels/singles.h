/* What sums of each sample's clipped or squared gradient take, where only the convolutions' gradients are ever written
 * out.
 *
 * A linear layer's gradient is the outer product of its outputs' gradients and its inputs, so its norm is the product
 * of theirs (Goodfellow, Efficient Per-Example Gradient Computations, 2015), and once a sample's factor is known, the
 * outputs' gradients are scaled and the batch is summed as ever. Its squares are the outer product of both squared.
 */

KERNEL double sum_squares(int count, const float *values)
{
    double sums[LANES] = {0}, total = 0;
    int k = 0;
    for (; k + LANES <= count; k += LANES)
        UNROLL
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] += (double)values[k + lane] * values[k + lane];
    for (; k < count; k++)
        total += (double)values[k] * values[k];
    for (int lane = 0; lane < LANES; lane++)
        total += sums[lane];
    return total;
}

/* Of one sample's gradient by a layer's weights and bias. */
KERNEL double linear_squares(const Linear s, const float *grad, const float *x)
{
    return sum_squares(s.outputs, grad) * (sum_squares(s.inputs, x) + 1);
}

KERNEL void scale(int count, float factor, float *values)
{
    for (int k = 0; k < count; k++)
        values[k] *= factor;
}

KERNEL void add_scaled(int count, float factor, const float *values, float *sums)
{
    for (int k = 0; k < count; k++)
        sums[k] += factor * values[k];
}

KERNEL void square(int count, float *values)
{
    for (int k = 0; k < count; k++)
        values[k] *= values[k];
}

KERNEL void add_squares(int count, const float *values, float *sums)
{
    for (int k = 0; k < count; k++)
        sums[k] += values[k] * values[k];
}
