/* The steps of hushfleet/learning/optim.py, each a single pass over memory.
 *
 * Every line rounds where NumPy rounds, so the results are NumPy's to the last bit: this file is compiled without
 * contraction, since a fused multiply-add would round once instead of twice.
 */
#include <math.h>
#include <stddef.h>

void sgd_step(float *restrict params, const float *restrict gradient, size_t size, float learning_rate)
{
    for (size_t i = 0; i < size; i++)
        params[i] -= learning_rate * gradient[i];
}

void momentum_step(float *restrict params, const float *restrict gradient, float *restrict velocity, size_t size,
                   float momentum, float learning_rate)
{
    for (size_t i = 0; i < size; i++) {
        const float moved = velocity[i] * momentum + gradient[i];
        velocity[i] = moved;
        params[i] -= learning_rate * moved;
    }
}

void adam_step(float *restrict params, const float *restrict gradient, float *restrict first, float *restrict second,
               size_t size, float beta_1, float rest_1, float beta_2, float rest_2, float root_correction,
               float epsilon, float step_size)
{
    for (size_t i = 0; i < size; i++) {
        const float g = gradient[i];
        const float mean = first[i] * beta_1 + rest_1 * g;
        const float square = second[i] * beta_2 + rest_2 * (g * g);
        first[i] = mean;
        second[i] = square;
        params[i] -= step_size * mean / (sqrtf(square) / root_correction + epsilon);
    }
}
