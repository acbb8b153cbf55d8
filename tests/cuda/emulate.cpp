// moves.cu on a CPU, thread after thread: the same index arithmetic over the same table, without a GPU.
#include <cstdint>

struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, gridDim;
struct ulonglong2 { unsigned long long x, y; };
#define __device__
#define __global__
#define __forceinline__ inline

#define WEIGHTSYNC_EMULATED
static void add(unsigned long long* out, unsigned long long value) { *out += value; }
#include "moves.cu"

extern "C" void run(const Row* rows, const int* tile_rows, long long tiles, u64* out, int digest) {
    gridDim.x = tiles / 2 + 1;  // some blocks have two tiles
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            digest ? move_and_digest(rows, tile_rows, tiles, out) : move_only(rows, tile_rows, tiles, out);
}
