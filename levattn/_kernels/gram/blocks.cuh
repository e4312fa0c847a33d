// Blocks of rows, numbered over all pieces of a call.

// The rows of one block: `pieces` (count, 4) are slot, item, first row, row after the last; `firsts` (count + 1,)
// numbers their first blocks. Without tables there is a piece for each matrix, of its first `whole` rows, fewer than 2³¹.
struct Block {
    long long item, start, stop;

    __device__ Block(const long long *pieces, const long long *firsts, int count, long long whole, long long block,
                     int block_rows) {
        if (!pieces) {
            // in 32 bits, as registers would spill
            const unsigned int each = ((unsigned int)whole + block_rows - 1) / block_rows;
            item = (unsigned int)block / each;
            start = (unsigned int)block % each * block_rows;
            stop = min(start + block_rows, whole);
            return;
        }
        int low = 0, high = count;  // the last piece that begins at this block or before
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (firsts[middle] <= block) low = middle;
            else high = middle;
        }
        item = pieces[4 * low + 1];
        start = pieces[4 * low + 2] + (block - firsts[low]) * block_rows;
        stop = min(start + block_rows, pieces[4 * low + 3]);
    }
};
