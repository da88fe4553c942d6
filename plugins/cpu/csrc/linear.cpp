#include "linear.h"

#include "kernels.h"
#include "attention.h"
#include "pool.h"

using namespace magicdec;

// product = x [rows, K] times the matrix, with all threads.
extern "C" __attribute__((visibility("default"))) void
magicdec_linear(const Matrix *matrix, const Rows *x, int64_t rows, const Product *product) {
    static thread_local Scratch scratch;
    const int64_t size = linear_thread_size(matrix->inputs);
    float *memory = scratch.reserve(size * num_threads());
    run_parallel([&](const Team &team) {
        float *mine = memory + team.index * size;
        kernels().linear(*matrix, *x, rows, share_of(matrix->num_panels, 1, team), *product, mine, false);
    });
}
