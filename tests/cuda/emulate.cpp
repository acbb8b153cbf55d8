// moves.cu on a CPU, thread after thread: the same index arithmetic over the same table, without a GPU.
#include <cstdint>

struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, gridDim;
struct ulonglong2 { unsigned long long x, y; };
#define __device__
#define __global__
#define __forceinline__ inline

#define WEIGHTSYNC_EMULATED
#define BEFORE_NEXT_TILE
static void add(unsigned long long* out, unsigned long long value) { *out += value; }
#include "moves.cu"

typedef void (*Kernel)(const Row*, const int*, i64, u64*);

extern "C" void run(const Row* rows, const int* tile_rows, i64 tiles, u64* out, int digest, int beside) {
    const Kernel whole = digest ? move_and_digest : move_only, shared = digest ? move_and_digest_beside : move_only_beside;
    gridDim.x = beside ? tiles / 2 + 1 : tiles;  // beside: some blocks have two tiles
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) (beside ? shared : whole)(rows, tile_rows, tiles, out);
}
