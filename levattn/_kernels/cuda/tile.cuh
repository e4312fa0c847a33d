// Tiles of products: a thread sums up EACH by EACH of them in registers.

constexpr int EACH = 4;            // entries of a tile, in either direction, of a thread
constexpr int SIDE = 16;           // threads along a side of a tile
constexpr int TILE = EACH * SIDE;  // entries along a side
constexpr int THREADS = SIDE * SIDE;
constexpr int STAGE = 16;          // terms of each product in shared memory at a time
constexpr int LOADS = STAGE * TILE / THREADS;
