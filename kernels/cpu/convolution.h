// DFlash 2's convolutions over the rows of a block. The reference is LocalConvolution in
// eagle_server/models/drafts/block_edges.py.
#pragma once

#include "session.h"

namespace {

// Around a sublayer: side 0 before it, side 1 after it. A row's kernel is base + what `projection` makes of the row.
struct Convolution {
    Packed projection;  // to [2, taps, hidden / group]; data null: there is no convolution
    const float* base;  // [2, taps, hidden]
    int32_t taps, group;  // group: channels that share what the projection makes
};

// The factors of channels i to i + LANES - 1, from those of groups of channels.
inline Vector spread(const float* factors, int group, int i, int n) {
    if (group % LANES == 0) return all(factors[i / group]);
    Vector x{};
    for (int lane = 0; lane < n; lane++) x[lane] = factors[(i + lane) / group];
    return x;
}

// Adds to y, or writes to it if not `add`, the convolution of z by side `side`; all are [rows, hidden]. dynamic: what the
// projection made of the rows. A block is the rows of a request. Row i of it is the sum over t of kernel[t] * z[i - t].
void convolve(Session& s, const Convolution& c, const Batch& batch, int side, const float* dynamic, const float* z, float* y, bool add) {
    const int hidden = c.projection.in, groups = hidden / c.group;
    const int32_t* ends = batch.qo_indptr + 1;
    for_rows(s.team, batch.rows, 4 * c.taps * hidden, [&](int r) {
        const int block = (int)(std::upper_bound(ends, ends + batch.requests, r) - ends);
        const int taps = std::min(c.taps, r - batch.qo_indptr[block] + 1);
        const float *base = c.base + (int64_t)side * c.taps * hidden, *factors = dynamic + ((int64_t)r * 2 + side) * c.taps * groups;
        const float* from = z + (int64_t)r * hidden;
        float* to = y + (int64_t)r * hidden;
        for (int i = 0; i < hidden; i += LANES) {
            const int n = std::min(LANES, hidden - i);
            Vector sum{};
            for (int t = 0; t < taps; t++) {
                const Vector kernel = load_some(base + t * hidden + i, n) + spread(factors + t * groups, c.group, i, n);
                sum = fma(kernel, load_some(from - (int64_t)t * hidden + i, n), sum);
            }
            store_some(to + i, add ? load_some(to + i, n) + sum : sum, n);
        }
    });
}

// Calls sublayer(x, y), which adds to y what it makes of x. With a convolution its input and output are convolved.
template <class Sublayer>
void convolved(Session& s, const Convolution& c, const Batch& batch, const float* x, float* y, const Sublayer& sublayer) {
    if (!c.projection.data) return sublayer(x, y);
    const int64_t rows = batch.rows, size = rows * c.projection.in;
    float* dynamic = Session::room(s.kernels, rows * c.projection.out);
    float *input = Session::room(s.convolved, 2 * size), *output = input + size;
    product(s, c.projection, x, rows, dynamic);
    convolve(s, c, batch, 0, dynamic, x, input, false);
    memset(output, 0, sizeof(float) * size);
    sublayer(input, output);
    convolve(s, c, batch, 1, dynamic, output, y, true);
}

}  // namespace
