// AMX, the matrix tiles of Intel's server processors: one instruction multiplies up to 16 rows of 16 words by 16 words of 16
// outputs. A row's sums do not depend on the number of rows. The instructions are written out, because GCC's macros take no
// template parameters.
//
// Registers 0 to 3 hold sums, 4 and 5 weights, 6 and 7 inputs.
#pragma once

#include <algorithm>
#include <cstdint>

#include <sys/syscall.h>
#include <unistd.h>

constexpr int TILE = 16;  // rows of a tile, and words of its rows

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512F__)
#define HAS_TILES

// Linux gives a process the tiles when it asks for them. Sandboxes may refuse.
static inline bool has_tiles() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
    return granted;
}

// The registers' shapes. They hold as long as the object.
class Tiles {
  public:
    Tiles() {
        for (int t = 0; t < 8; t++) set(t, 1, TILE);
    }
    Tiles(const Tiles&) = delete;
    ~Tiles() { asm volatile("tilerelease" ::: "memory"); }

    void set(int tile, int rows, int words) { shape_.rows[tile] = rows, shape_.bytes[tile] = 4 * words; }
    void begin() const { asm volatile("ldtilecfg %0" ::"m"(shape_)); }

  private:
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14]{};
        uint16_t bytes[16]{};
        uint8_t rows[16]{};
    } shape_;
};

template <int tile> static inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(tile)); }

// `stride`: words between rows. Rows that cross a cache line take six times as long.
template <int tile> static inline void tile_load(const uint32_t* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(4 * stride), "i"(tile) : "memory");
}

template <int tile> static inline void tile_store(uint32_t* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(4 * stride), "i"(tile) : "memory");
}

enum TileDot { PAIRS, SIGNED, UNSIGNED };  // pairs of bfloat16, or signed bytes times bytes of this kind

// sums += inputs * weights
template <TileDot dot, int sums, int inputs, int weights> static inline void tile_dot() {
    if constexpr (dot == SIGNED) asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(inputs), "i"(weights));
    else if constexpr (dot == UNSIGNED) asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(inputs), "i"(weights));
    else asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(inputs), "i"(weights));
}

// Calls work.operator()<0>() to <count - 1>().
template <int count, class Work> static inline void each(const Work& work) {
    if constexpr (count > 1) each<count - 1>(work);
    work.template operator()<count - 1>();
}

#else

static inline bool has_tiles() { return false; }

#endif
