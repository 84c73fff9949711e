// The CPU's hot loops: products with packed weights, rows of a packed embedding, attention over the KV buffers, what is
// drafted, and the law that tokens are drawn from.
//
// Invariant: a row's result depends on that row alone. Every sum runs in one order, over the features of a product and
// over the slots of an attention, whatever the number of rows, the extent, or where in a tree a row stands; an invisible
// slot adds exactly nothing. So a token decoded alone and the same token verified in a tree give the same bits.
//
// Weights are kept in the smallest format that holds them exactly (yggc/packing.py writes it) and multiplied in float32.
// A matrix [N, K] lies in panels of PANEL rows; a panel holds, feature after feature, its PANEL weights.

#include <omp.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <utility>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int PANEL = 32;      // weights side by side; yggc/packing.py has the same number
constexpr int BLOCK = 32;      // features that share a scale and an offset; as in yggc/packing.py
constexpr int QUAD = 4;        // neighbouring features whose levels lie together; as in yggc/packing.py
constexpr int AHEAD = 4096;    // bytes that weights are fetched ahead of their use: the hardware stops at every page
constexpr int CHUNK = 64;      // features decoded at a time, so that they stay in the first-level cache
constexpr int TILE_VECTORS = PANEL / LANES < 2 ? 1 : 2;
constexpr int TILE_COLUMNS = TILE_VECTORS * LANES;
constexpr int TILE_ROWS = LANES == 8 ? 4 : 8;  // accumulators of a tile fill the registers
constexpr int QUERY_ROWS = 12;  // rows that share the work on a head's keys
constexpr int VALUE_VECTORS = 4;
constexpr int VALUE_ROWS = LANES == 8 ? 2 : 4;

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t IntVector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t HalfBits __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t UintVector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
inline Vector broadcast(float value) { return value - Vector{}; }

inline Vector read_float32(const uint8_t* from) { return load(reinterpret_cast<const float*>(from)); }

inline Vector read_bfloat16(const uint8_t* from) {
#if defined(__AVX512F__)
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return reinterpret_cast<Vector>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
#elif defined(__AVX2__)
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Vector>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#else
  const UintVector bits = __builtin_convertvector(*reinterpret_cast<const HalfBits*>(from), UintVector) << 16;
  return reinterpret_cast<const Vector&>(bits);
#endif
}

inline Vector read_float16(const uint8_t* from) {
#if defined(__F16C__) && defined(__AVX512F__)
  return reinterpret_cast<Vector>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  return reinterpret_cast<Vector>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Vector value;
  for (int lane = 0; lane < LANES; ++lane) {
    _Float16 half;
    std::memcpy(&half, from + lane * 2, 2);
    value[lane] = static_cast<float>(half);
  }
  return value;
#endif
}

inline float bfloat16_value(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline uint16_t to_bfloat16(float value) {  // to the nearest, ties to even, as torch does
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void put(float* to, float value) { *to = value; }
inline void put(uint16_t* to, float value) { *to = to_bfloat16(value); }
inline void put_vector(float* to, Vector value) { store(to, value); }
inline void put_vector(uint16_t* to, Vector value) {
  for (int lane = 0; lane < LANES; ++lane) put(to + lane, value[lane]);
}

// ---- packed formats ----
//
// Each visits features [first, first + count) of TILE_COLUMNS weights of a panel, from `column` on: use(feature, weights).

struct Weights {
  Vector part[TILE_VECTORS];
};

template <int BYTES, Vector (*READ)(const uint8_t*), bool FROM_MEMORY = true>
struct Plain {
  static int64_t panel_bytes(int64_t features) { return features * PANEL * BYTES; }
  template <class Use>
  static inline __attribute__((always_inline)) void visit(
      const uint8_t* panel, int column, int64_t first, int64_t count, Use&& use) {
    const uint8_t* from = panel + (first * PANEL + column) * BYTES;
    for (int64_t feature = 0; feature < count; ++feature, from += PANEL * BYTES) {
      for (int line = 0; FROM_MEMORY && line < TILE_COLUMNS * BYTES; line += 64)
        __builtin_prefetch(from + AHEAD + line);
      Weights weights;
      for (int v = 0; v < TILE_VECTORS; ++v) weights.part[v] = READ(from + v * LANES * BYTES);
      use(feature, weights);
    }
  }
};

using Float32 = Plain<4, read_float32>;
using Decoded = Plain<4, read_float32, false>;
using BFloat16 = Plain<2, read_bfloat16>;
using Float16 = Plain<2, read_float16>;

// weight = level * scale + offset; a block is BLOCK features of PANEL weights: scales and offsets (float16), then levels.
// The levels of QUAD neighbouring features of a weight share 32 bits, the first in the lowest byte; with 4 bits those of
// the next QUAD features are in the upper halves of these bytes.
template <int BITS_OF_LEVEL>
struct Affine {
  static constexpr int BITS = BITS_OF_LEVEL;
  static constexpr int64_t BLOCK_BYTES = PANEL * 4 + BLOCK * PANEL * BITS / 8;
  static int64_t panel_bytes(int64_t features) { return features / BLOCK * BLOCK_BYTES; }
  template <class Use>
  static inline __attribute__((always_inline)) void visit(
      const uint8_t* panel, int column, int64_t first, int64_t count, Use&& use) {
    constexpr int TOGETHER = QUAD * 8 / BITS;
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
      const uint8_t* block = panel + (first + begin) / BLOCK * BLOCK_BYTES;
      const uint8_t* levels = block + PANEL * 4 + column * QUAD;
      for (int line = 0; column == 0 && line < BLOCK_BYTES; line += 64) __builtin_prefetch(block + AHEAD + line);
      Weights scale, offset;
      for (int v = 0; v < TILE_VECTORS; ++v) {
        scale.part[v] = read_float16(block + (column + v * LANES) * 2);
        offset.part[v] = read_float16(block + (PANEL + column + v * LANES) * 2);
      }
      for (int64_t feature = begin; feature < begin + BLOCK; feature += TOGETHER, levels += PANEL * QUAD) {
        IntVector stored[TILE_VECTORS];
        for (int v = 0; v < TILE_VECTORS; ++v)
          stored[v] = *reinterpret_cast<const IntVector*>(levels + v * LANES * QUAD);
#pragma GCC unroll 8
        for (int part = 0; part < TOGETHER; ++part) {
          const int shift = part % QUAD * 8 + part / QUAD * 4;
          Weights weights;
          for (int v = 0; v < TILE_VECTORS; ++v) {
            const IntVector level = stored[v] >> shift & (1 << BITS) - 1;
            weights.part[v] = __builtin_convertvector(level, Vector) * scale.part[v] + offset.part[v];
          }
          use(feature + part, weights);
        }
      }
    }
  }
};

using Affine8 = Affine<8>;
using Affine4 = Affine<4>;

// Features [first, first + count) of a panel as float32 [count, PANEL].
template <class Packed>
void decode(const uint8_t* panel, int64_t first, int64_t count, float* out) {
  for (int column = 0; column < PANEL; column += TILE_COLUMNS)
    Packed::visit(panel, column, first, count, [&](int64_t feature, const Weights& weights) {
      for (int v = 0; v < TILE_VECTORS; ++v) store(out + feature * PANEL + column + v * LANES, weights.part[v]);
    });
}

enum Format : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, AFFINE8 = 3, AFFINE4 = 4 };

bool known_format(int64_t format) { return format >= FLOAT32 && format <= AFFINE4; }

template <class Visitor>
void with_format(int64_t format, Visitor&& visit) {
  switch (format) {
    case FLOAT32: visit(Float32{}); return;
    case BFLOAT16: visit(BFloat16{}); return;
    case FLOAT16: visit(Float16{}); return;
    case AFFINE8: visit(Affine8{}); return;
    case AFFINE4: visit(Affine4{}); return;
    default: return;
  }
}

// ---- products ----

// sums[ROWS, TILE_COLUMNS] of a tile, one feature after the other; `visit` calls with each feature's weights.
template <int ROWS>
struct Tile {
  Vector sum[ROWS][TILE_VECTORS];

  inline __attribute__((always_inline)) void add(const float* inputs, int64_t stride, const Weights& weights) {
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
      const Vector input = broadcast(inputs[row * stride]);
#pragma GCC unroll 2
      for (int v = 0; v < TILE_VECTORS; ++v) sum[row][v] += input * weights.part[v];
    }
  }

  inline __attribute__((always_inline)) void read(const float* from) {
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
      for (int v = 0; v < TILE_VECTORS; ++v) sum[row][v] = load(from + row * PANEL + v * LANES);
  }

  inline __attribute__((always_inline)) void write(float* to) const {
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
      for (int v = 0; v < TILE_VECTORS; ++v) store(to + row * PANEL + v * LANES, sum[row][v]);
  }
};

// sums[ROWS, PANEL] += inputs[ROWS, first to first + count] x the panel's weights.
template <class Packed, int ROWS>
void multiply_tile(
    const float* inputs, int64_t stride, const uint8_t* panel, int64_t first, int64_t count, float* sums) {
  for (int column = 0; column < PANEL; column += TILE_COLUMNS) {
    Tile<ROWS> tile;
    tile.read(sums + column);
    const float* from = inputs + first;
    Packed::visit(panel, column, first, count, [&](int64_t feature, const Weights& weights) {
      tile.add(from + feature, stride, weights);
    });
    tile.write(sums + column);
  }
}

template <class Packed>
void multiply_few(
    int64_t rows, const float* inputs, int64_t stride, const uint8_t* panel, int64_t first, int64_t count, float* sums) {
  switch (rows) {
    case 1: multiply_tile<Packed, 1>(inputs, stride, panel, first, count, sums); break;
    case 2: multiply_tile<Packed, 2>(inputs, stride, panel, first, count, sums); break;
    case 3: multiply_tile<Packed, 3>(inputs, stride, panel, first, count, sums); break;
    case 4: multiply_tile<Packed, 4>(inputs, stride, panel, first, count, sums); break;
    case 5: multiply_tile<Packed, 5>(inputs, stride, panel, first, count, sums); break;
    case 6: multiply_tile<Packed, 6>(inputs, stride, panel, first, count, sums); break;
    case 7: multiply_tile<Packed, 7>(inputs, stride, panel, first, count, sums); break;
    case 8: multiply_tile<Packed, 8>(inputs, stride, panel, first, count, sums); break;
    default: break;
  }
}

// A thread's memory for what it does again and again: asking the system for it anew can cost more than the work.
template <class Item>
class Kept {
 public:
  Kept() = default;
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() { operator delete(data_, std::align_val_t(64)); }
  Item* at_least(int64_t count) {
    if (count > size_) {
      operator delete(data_, std::align_val_t(64));
      data_ = nullptr, size_ = 0;
      data_ = static_cast<Item*>(operator new(count * sizeof(Item), std::align_val_t(64)));
      size_ = count;
    }
    return data_;
  }

 private:
  Item* data_ = nullptr;
  int64_t size_ = 0;
};

// outputs[rows, columns], columns from `panel` * PANEL on = sums[rows, PANEL].
template <class Element>
inline void put_panel(const float* sums, int64_t rows, int64_t panel, int64_t columns, Element* outputs) {
  const int64_t begin = panel * PANEL, width = std::min<int64_t>(PANEL, columns - begin);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < width; ++column)
      put(outputs + row * columns + begin + column, sums[row * PANEL + column]);
}

#if defined(__AVX512VNNI__)

// Products of levels in whole numbers, which spares decoding them: 64 short products at a time instead of 16 long ones.
// A block's inputs become whole numbers of LARGEST over the largest of them, so that rounding one changes it by no more
// than rounding the largest to float32 does. Each is three digits to base 256, and a sum of digits by levels is exact.
constexpr int DIGITS = 3;
constexpr float LARGEST = 8355000.0f;  // below 127 * (256 * 256 + 256 + 1), with room for rounding
constexpr float SMALLEST = 1e-30f;     // inputs of a block with nothing larger count as zero
constexpr int LEVEL_ROWS = 4;
constexpr int LEVEL_VECTORS = PANEL / LANES;

// BLOCK inputs: digit d of inputs 4 i to 4 i + 3 in digits[d][i]. input = number * scale; sum is that of the inputs.
struct WholeBlock {
  int32_t digits[DIGITS][BLOCK / QUAD];
  float scale, sum;
};

inline void to_whole(const float* inputs, WholeBlock& block) {
  const __m512 part[2] = {_mm512_loadu_ps(inputs), _mm512_loadu_ps(inputs + LANES)};
  const __m512i unsigned_bits = _mm512_set1_epi32(0x7fffffff);  // in order of size, and what is not a number the largest
  const int32_t bits = _mm512_reduce_max_epi32(_mm512_max_epi32(
      _mm512_and_epi32(_mm512_castps_si512(part[0]), unsigned_bits),
      _mm512_and_epi32(_mm512_castps_si512(part[1]), unsigned_bits)));
  float most;
  std::memcpy(&most, &bits, 4);
  const bool nothing = most <= SMALLEST;
  const __m512 numbers_per_unit = _mm512_set1_ps(nothing ? 0.0f : LARGEST / most);
  block.scale = nothing ? 0.0f : most / LARGEST;
  __m512i number[2];
  for (int half = 0; half < 2; ++half) number[half] = _mm512_cvtps_epi32(_mm512_mul_ps(part[half], numbers_per_unit));
  block.sum = block.scale * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(number[0], number[1])));
  for (int digit = 0; digit < DIGITS; ++digit)
    for (int half = 0; half < 2; ++half) {
      const __m128i lowest = _mm512_cvtepi32_epi8(number[half]);  // signed, so the rest is a multiple of 256
      _mm_storeu_si128(reinterpret_cast<__m128i*>(block.digits[digit] + half * LANES / QUAD), lowest);
      number[half] = _mm512_srai_epi32(_mm512_sub_epi32(number[half], _mm512_cvtepi8_epi32(lowest)), 8);
    }
}

// sums[ROWS, PANEL] = inputs[ROWS, blocks of features] x the panel's weights.
template <class Packed, int ROWS>
void multiply_levels(const WholeBlock* inputs, int64_t blocks, const uint8_t* panel, float* sums) {
  constexpr int HALVES = 8 / Packed::BITS;
  const __m512i low_halves = _mm512_set1_epi8(15);
  __m512 total[ROWS][LEVEL_VECTORS] = {};
  for (int64_t index = 0; index < blocks; ++index) {
    const uint8_t* block = panel + index * Packed::BLOCK_BYTES;
    const uint8_t* levels = block + PANEL * 4;
    for (int line = 0; line < Packed::BLOCK_BYTES; line += 64) __builtin_prefetch(block + AHEAD + line);
    __m512i sum[ROWS][DIGITS][LEVEL_VECTORS] = {};
#pragma GCC unroll 8
    for (int quad = 0; quad < BLOCK / QUAD; quad += HALVES, levels += PANEL * QUAD) {
      __m512i stored[LEVEL_VECTORS];
      for (int v = 0; v < LEVEL_VECTORS; ++v) stored[v] = _mm512_loadu_si512(levels + v * LANES * QUAD);
#pragma GCC unroll 2
      for (int half = 0; half < HALVES; ++half) {
        __m512i level[LEVEL_VECTORS];
        for (int v = 0; v < LEVEL_VECTORS; ++v)
          level[v] = HALVES == 1 ? stored[v]
                                 : _mm512_and_si512(half ? _mm512_srli_epi16(stored[v], 4) : stored[v], low_halves);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 3
          for (int digit = 0; digit < DIGITS; ++digit) {
            const __m512i four = _mm512_set1_epi32(inputs[row * blocks + index].digits[digit][quad + half]);
#pragma GCC unroll 2
            for (int v = 0; v < LEVEL_VECTORS; ++v)
              sum[row][digit][v] = _mm512_dpbusd_epi32(sum[row][digit][v], level[v], four);
          }
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < LEVEL_VECTORS; ++v) {
      const Vector scale = read_float16(block + v * LANES * 2), offset = read_float16(block + (PANEL + v * LANES) * 2);
#pragma GCC unroll 4
      for (int row = 0; row < ROWS; ++row) {
        const WholeBlock& input = inputs[row * blocks + index];
        const __m512 low = _mm512_cvtepi32_ps(
            _mm512_add_epi32(_mm512_slli_epi32(sum[row][1][v], 8), sum[row][0][v]));
        const __m512 whole = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[row][2][v]), _mm512_set1_ps(65536.0f), low);
        const __m512 step = _mm512_mul_ps(reinterpret_cast<__m512>(scale), _mm512_set1_ps(input.scale));
        total[row][v] = _mm512_fmadd_ps(whole, step, total[row][v]);
        total[row][v] = _mm512_fmadd_ps(reinterpret_cast<__m512>(offset), _mm512_set1_ps(input.sum), total[row][v]);
      }
    }
  }
  for (int row = 0; row < ROWS; ++row)
    for (int v = 0; v < LEVEL_VECTORS; ++v) _mm512_storeu_ps(sums + row * PANEL + v * LANES, total[row][v]);
}

constexpr int64_t ROWS_TOGETHER = 64;  // so that their whole numbers stay in the second-level cache
constexpr int64_t FEW_ROWS = 8;        // that every thread makes whole for itself, rather than wait for another

template <int BITS, class Element>
void multiply(
    Affine<BITS> kind, const float* inputs, int64_t rows, int64_t features, const uint8_t* weights, int64_t columns,
    Element* outputs) {
  using Packed = decltype(kind);
  const int64_t panels = (columns + PANEL - 1) / PANEL, blocks = features / BLOCK;
  for (; rows > 0; inputs += ROWS_TOGETHER * features, outputs += ROWS_TOGETHER * columns, rows -= ROWS_TOGETHER) {
    const int64_t together = std::min(ROWS_TOGETHER, rows), numbers = together * blocks;
    static thread_local Kept<WholeBlock> kept_for_all;
    WholeBlock* for_all = together > FEW_ROWS ? kept_for_all.at_least(numbers) : nullptr;
#pragma omp parallel
    {
      static thread_local Kept<WholeBlock> kept;
      WholeBlock* whole = for_all ? for_all : kept.at_least(numbers);
      if (for_all) {
#pragma omp for
        for (int64_t index = 0; index < numbers; ++index) to_whole(inputs + index * BLOCK, whole[index]);
      } else {
        for (int64_t index = 0; index < numbers; ++index) to_whole(inputs + index * BLOCK, whole[index]);
      }
      const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
      alignas(64) float sums[LEVEL_ROWS * PANEL];
      for (int64_t panel = panels * thread / threads; panel < panels * (thread + 1) / threads; ++panel) {
        const uint8_t* packed = weights + panel * Packed::panel_bytes(features);
        for (int64_t row = 0; row < together; row += LEVEL_ROWS) {
          const int64_t count = std::min<int64_t>(LEVEL_ROWS, together - row);
          const WholeBlock* from = whole + row * blocks;
          switch (count) {
            case 1: multiply_levels<Packed, 1>(from, blocks, packed, sums); break;
            case 2: multiply_levels<Packed, 2>(from, blocks, packed, sums); break;
            case 3: multiply_levels<Packed, 3>(from, blocks, packed, sums); break;
            default: multiply_levels<Packed, LEVEL_ROWS>(from, blocks, packed, sums); break;
          }
          put_panel(sums, count, panel, columns, outputs + row * columns);
        }
      }
    }
  }
}

#endif

// outputs[rows, columns] = inputs[rows, features] x weights[columns, features] transposed. Few rows take their weights
// straight from the packed panel; for many it is decoded once, a chunk at a time.
template <class Packed, class Element>
void multiply(
    Packed, const float* inputs, int64_t rows, int64_t features, const uint8_t* weights, int64_t columns,
    Element* outputs) {
  const int64_t panels = (columns + PANEL - 1) / PANEL;
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    static thread_local Kept<float> kept;
    float* sums = kept.at_least(rows * PANEL);
    alignas(64) float decoded[CHUNK * PANEL];
    for (int64_t panel = panels * thread / threads; panel < panels * (thread + 1) / threads; ++panel) {
      const uint8_t* packed = weights + panel * Packed::panel_bytes(features);
      std::fill_n(sums, rows * PANEL, 0.0f);
      if (rows <= TILE_ROWS) {
        multiply_few<Packed>(rows, inputs, features, packed, 0, features, sums);
      } else {
        for (int64_t first = 0; first < features; first += CHUNK) {
          const int64_t count = std::min<int64_t>(CHUNK, features - first);
          decode<Packed>(packed, first, count, decoded);
          for (int64_t row = 0; row < rows; row += TILE_ROWS)
            multiply_few<Decoded>(
                std::min<int64_t>(TILE_ROWS, rows - row), inputs + row * features + first, features,
                reinterpret_cast<const uint8_t*>(decoded), 0, count, sums + row * PANEL);
        }
      }
      put_panel(sums, rows, panel, columns, outputs);
    }
  }
}

// ---- rows of an embedding ----

template <class Packed, class Element>
void gather(const int64_t* tokens, int64_t count, const uint8_t* weights, int64_t features, Element* outputs) {
  alignas(64) float decoded[CHUNK * PANEL];
  for (int64_t index = 0; index < count; ++index) {
    const uint8_t* packed = weights + tokens[index] / PANEL * Packed::panel_bytes(features);
    const int64_t column = tokens[index] % PANEL;
    for (int64_t first = 0; first < features; first += CHUNK) {
      const int64_t chunk = std::min<int64_t>(CHUNK, features - first);
      decode<Packed>(packed, first, chunk, decoded);
      for (int64_t feature = 0; feature < chunk; ++feature)
        put(outputs + index * features + first + feature, decoded[feature * PANEL + column]);
    }
  }
}

// ---- attention ----

inline Vector exponential(Vector x) {  // x <= 0; exactly 0 below -87, and within 2 units in the last place above
  const Vector turns = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const Vector rest = (x - turns * 0.693359375f) + turns * 2.12194440e-4f;
  Vector sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  const IntVector exponent = (__builtin_convertvector(turns, IntVector) + 127) << 23;
  return x < -87.0f ? Vector{} : sum * reinterpret_cast<const Vector&>(exponent);
}

template <class Element>
inline void prefetch(const Element* from, int64_t count) {
  for (int64_t at = 0; at < count; at += 64 / static_cast<int64_t>(sizeof(Element))) __builtin_prefetch(from + at);
}

inline float element(const float* from, int64_t index) { return from[index]; }
inline float element(const uint16_t* from, int64_t index) { return bfloat16_value(from[index]); }
inline Vector elements(const float* from) { return load(from); }
inline Vector elements(const uint16_t* from) { return read_bfloat16(reinterpret_cast<const uint8_t*>(from)); }

struct AttentionSizes {
  int64_t width, heads, kv_heads, key_dim, value_dim, extent;
  int64_t query_row, query_head, key_head, value_head, mask_row;  // strides, in elements
  float scale;
  int64_t tiles, stride, first_block, end_block;  // of a KV head; floats of a row's scores; the blocks that are seen
};

constexpr float INVISIBLE = -20000.0f;  // a mask below it hides its slot

template <int DISTANCE, std::size_t... LANE>
inline void exchange(Vector& low, Vector& high, std::index_sequence<LANE...>) {
  const Vector first = low, second = high;
  low = __builtin_shufflevector(first, second, ((LANE & DISTANCE) ? LANES + LANE - DISTANCE : LANE)...);
  high = __builtin_shufflevector(first, second, ((LANE & DISTANCE) ? LANES + LANE : LANE + DISTANCE)...);
}

template <int DISTANCE>
inline __attribute__((always_inline)) void exchange_all(Vector* rows) {
#pragma GCC unroll 16
  for (int row = 0; row < LANES; ++row)
    if (!(row & DISTANCE)) exchange<DISTANCE>(rows[row], rows[row | DISTANCE], std::make_index_sequence<LANES>{});
  if constexpr (DISTANCE * 2 < LANES) exchange_all<DISTANCE * 2>(rows);
}

// keys [LANES slots, dim] as turned [dim, LANES slots]; slots from `count` on are zero.
template <class Element>
void turn_keys(const Element* keys, int64_t dim, int64_t count, float* turned) {
  int64_t first = 0;
  if (count == LANES)
    for (; first + LANES <= dim; first += LANES) {
      Vector rows[LANES];
#pragma GCC unroll 16
      for (int slot = 0; slot < LANES; ++slot) rows[slot] = elements(keys + slot * dim + first);
      exchange_all<1>(rows);
#pragma GCC unroll 16
      for (int row = 0; row < LANES; ++row) store(turned + (first + row) * LANES, rows[row]);
    }
  for (; first < dim; ++first)
    for (int64_t slot = 0; slot < LANES; ++slot)
      turned[first * LANES + slot] = slot < count ? element(keys, slot * dim + first) : 0.0f;
}

// ahead: as many keys as `turned` holds, which are wanted soon; fetched one by one, since a burst would wait for itself.
template <int ROWS, class Element>
inline void score_rows(
    const float* queries, const float* turned, int64_t dim, const Element* ahead, float* scores, int64_t stride) {
  Vector sum[ROWS] = {};
  for (int64_t index = 0; index < dim; ++index) {
    if (ahead) __builtin_prefetch(ahead + index * LANES);
    const Vector key = load(turned + index * LANES);
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) sum[row] += broadcast(queries[row * dim + index]) * key;
  }
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; ++row) store(scores + row * stride, sum[row]);
}

// to[row][at ...] = the values of VECTORS * LANES dimensions, weighed slot after slot, over total[row].
template <int VECTORS, class Element>
inline void weigh_values(
    const AttentionSizes& sizes, const uint8_t* seen, const float* const* weights, const float* total,
    const Element* values, int64_t count, Element* const* to, int64_t at) {
  Vector sum[VALUE_ROWS][VECTORS] = {};
  for (int64_t block = sizes.first_block; block < sizes.end_block; ++block) {
    if (!seen[block]) continue;
    for (int64_t slot = block * LANES; slot < std::min(sizes.extent, (block + 1) * LANES); ++slot) {
      const Element* from = values + slot * sizes.value_dim;
      prefetch(from + LANES * sizes.value_dim, VECTORS * LANES);
      Vector part[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) part[v] = elements(from + v * LANES);
#pragma GCC unroll 4
      for (int row = 0; row < VALUE_ROWS; ++row) {
        const Vector weight = broadcast(weights[row][slot]);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sum[row][v] += weight * part[v];
      }
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < VALUE_ROWS; ++row)
    if (row < count)
      for (int v = 0; v < VECTORS; ++v) put_vector(to[row] + at + v * LANES, sum[row][v] / broadcast(total[row]));
}

// Up to QUERY_ROWS rows of one KV head: row r of it is query head r / width of the head's group, token r % width.
// offset: of its first row among those of all tiles.
struct AttentionTile {
  int64_t kv_head, rows, offset, head[QUERY_ROWS], token[QUERY_ROWS];

  AttentionTile(const AttentionSizes& sizes, int64_t index) {
    const int64_t group = sizes.heads / sizes.kv_heads, first = index % sizes.tiles * QUERY_ROWS;
    kv_head = index / sizes.tiles;
    rows = std::min<int64_t>(QUERY_ROWS, group * sizes.width - first);
    offset = kv_head * group * sizes.width + first;
    for (int64_t row = 0; row < rows; ++row) {
      head[row] = kv_head * group + (first + row) / sizes.width;
      token[row] = (first + row) % sizes.width;
    }
  }
};

// Scores of a tile's rows in blocks [first, end), and whether any of them sees a slot of a block.
// scratch: QUERY_ROWS queries and a block of keys, of key_dim each.
template <class Element>
void score(
    const AttentionSizes& sizes, const AttentionTile& tile, int64_t first, int64_t end, const Element* queries,
    const Element* keys, const Element* mask, float* scores, uint8_t* seen, float* scratch) {
  const int64_t dim = sizes.key_dim, stride = sizes.stride, rows = tile.rows;
  const Element* key = keys + tile.kv_head * sizes.key_head;
  float* scaled = scratch;
  float* turned = scaled + QUERY_ROWS * dim;
  for (int64_t row = 0; row < rows; ++row) {
    const Element* query = queries + tile.token[row] * sizes.query_row + tile.head[row] * sizes.query_head;
    for (int64_t index = 0; index < dim; ++index) scaled[row * dim + index] = element(query, index) * sizes.scale;
  }
  const Vector hidden = broadcast(-INFINITY);
  for (int64_t block = first; block < end; ++block) {
    const int64_t slot = block * LANES, count = std::min<int64_t>(LANES, sizes.extent - slot);
    Vector visible[QUERY_ROWS];
    IntVector shown = {};
    for (int64_t row = 0; row < rows; ++row) {
      const Element* from = mask + tile.token[row] * sizes.mask_row + slot;
      if (count == LANES) {
        visible[row] = elements(from);
      } else {
        visible[row] = hidden;
        for (int64_t lane = 0; lane < count; ++lane) visible[row][lane] = element(from, lane);
      }
      shown |= visible[row] > INVISIBLE;
    }
    int32_t any = 0;
    for (int lane = 0; lane < LANES; ++lane) any |= shown[lane];
    seen[block] = any != 0;
    if (!any) continue;
    turn_keys(key + slot * dim, dim, count, turned);
    float* to = scores + slot;
    const Element* ahead = key + (slot + 2 * LANES) * dim;
    for (int64_t row = 0; row < rows; row += 4, ahead = nullptr) {
      const float* from = scaled + row * dim;
      switch (std::min<int64_t>(4, rows - row)) {
        case 1: score_rows<1>(from, turned, dim, ahead, to + row * stride, stride); break;
        case 2: score_rows<2>(from, turned, dim, ahead, to + row * stride, stride); break;
        case 3: score_rows<3>(from, turned, dim, ahead, to + row * stride, stride); break;
        default: score_rows<4>(from, turned, dim, ahead, to + row * stride, stride); break;
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      float* at = to + row * stride;
      store(at, visible[row] > INVISIBLE ? load(at) + visible[row] : hidden);
    }
  }
}

// Outputs of up to VALUE_ROWS rows of a tile, from row `first` on. scratch: VALUE_ROWS rows of weights.
template <class Element>
void weigh(
    const AttentionSizes& sizes, const AttentionTile& tile, int64_t first, const float* scores, const uint8_t* seen,
    const Element* values, Element* outputs, float* scratch) {
  const int64_t count = std::min<int64_t>(VALUE_ROWS, tile.rows - first);
  const Element* value = values + tile.kv_head * sizes.value_head;
  const float* weights[VALUE_ROWS];  // rows beyond the last repeat it
  for (int64_t row = 0; row < VALUE_ROWS; ++row) weights[row] = scratch + std::min(row, count - 1) * sizes.stride;
  for (int64_t row = 0; row < count; ++row) {
    const float* from = scores + (first + row) * sizes.stride;
    Vector largest = broadcast(-INFINITY);
    for (int64_t block = sizes.first_block; block < sizes.end_block; ++block)
      if (seen[block]) {
        const Vector here = load(from + block * LANES);
        largest = largest > here ? largest : here;
      }
    float most = -INFINITY;
    for (int lane = 0; lane < LANES; ++lane) most = std::max(most, largest[lane]);
    float* to = scratch + row * sizes.stride;
    for (int64_t block = sizes.first_block; block < sizes.end_block; ++block)
      if (seen[block]) store(to + block * LANES, exponential(load(from + block * LANES) - broadcast(most)));
  }
  float total[VALUE_ROWS] = {};
  for (int64_t block = sizes.first_block; block < sizes.end_block; ++block)
    if (seen[block])
      for (int64_t slot = block * LANES; slot < std::min(sizes.extent, (block + 1) * LANES); ++slot)
        for (int row = 0; row < VALUE_ROWS; ++row) total[row] += weights[row][slot];
  Element* to[VALUE_ROWS];
  for (int64_t row = 0; row < count; ++row)
    to[row] = outputs + (tile.token[first + row] * sizes.heads + tile.head[first + row]) * sizes.value_dim;
  int64_t at = 0;
  for (; at + VALUE_VECTORS * LANES <= sizes.value_dim; at += VALUE_VECTORS * LANES)
    weigh_values<VALUE_VECTORS>(sizes, seen, weights, total, value + at, count, to, at);
  for (; at + LANES <= sizes.value_dim; at += LANES)
    weigh_values<1>(sizes, seen, weights, total, value + at, count, to, at);
  for (; at < sizes.value_dim; ++at)
    for (int64_t row = 0; row < count; ++row) {
      float sum = 0;
      for (int64_t block = sizes.first_block; block < sizes.end_block; ++block)
        if (seen[block])
          for (int64_t slot = block * LANES; slot < std::min(sizes.extent, (block + 1) * LANES); ++slot)
            sum = std::fma(weights[row][slot], element(value, slot * sizes.value_dim + at), sum);
      put(to[row] + at, sum / total[row]);
    }
}

// The blocks from the first to the last that any token sees.
template <class Element>
void find_visible(const Element* mask, AttentionSizes& sizes) {
  const int64_t blocks = (sizes.extent + LANES - 1) / LANES;
  auto sees = [&](int64_t block) {
    const int64_t slot = block * LANES, count = std::min<int64_t>(LANES, sizes.extent - slot);
    bool any = false;
    for (int64_t token = 0; token < sizes.width && !any; ++token)
      for (int64_t lane = 0; lane < count; ++lane)
        any |= element(mask, token * sizes.mask_row + slot + lane) > INVISIBLE;
    return any;
  };
  sizes.first_block = 0, sizes.end_block = blocks;
  while (sizes.end_block > 1 && !sees(sizes.end_block - 1)) --sizes.end_block;
  while (sizes.first_block + 1 < sizes.end_block && !sees(sizes.first_block)) ++sizes.first_block;
}

constexpr int64_t MANY_TILES = 8;  // for every thread

// Where tiles are many, or come out even, each is one thread's. Where not, threads take even shares of all tiles' blocks,
// and then of their rows. What is summed, and in which order, is the same.
template <class Element>
void attend(
    AttentionSizes sizes, const Element* queries, const Element* keys, const Element* values, const Element* mask,
    Element* outputs) {
  const int64_t head_rows = sizes.heads / sizes.kv_heads * sizes.width, blocks = (sizes.extent + LANES - 1) / LANES;
  sizes.tiles = (head_rows + QUERY_ROWS - 1) / QUERY_ROWS;
  sizes.stride = blocks * LANES;
  find_visible(mask, sizes);
  const int64_t tiles = sizes.kv_heads * sizes.tiles, num_seen = sizes.end_block - sizes.first_block;
  const int64_t tile_size = (QUERY_ROWS + LANES) * sizes.key_dim, weights_size = VALUE_ROWS * sizes.stride;
  const bool apart = tiles >= MANY_TILES * omp_get_max_threads() || tiles % omp_get_max_threads() == 0;
  static thread_local Kept<float> kept_scores;
  static thread_local Kept<uint8_t> kept_seen;
  float* all_scores = apart ? nullptr : kept_scores.at_least(sizes.kv_heads * head_rows * sizes.stride);
  uint8_t* all_seen = apart ? nullptr : kept_seen.at_least(tiles * blocks);
#pragma omp parallel
  {
    static thread_local Kept<float> kept;
    static thread_local Kept<uint8_t> own_seen;
    float* scratch = kept.at_least(tile_size + weights_size + (apart ? QUERY_ROWS * sizes.stride : 0));
    float* weights = scratch + tile_size;
    if (apart) {
      float* scores = weights + weights_size;
      uint8_t* seen = own_seen.at_least(blocks);
#pragma omp for schedule(dynamic)
      for (int64_t index = 0; index < tiles; ++index) {
        const AttentionTile tile(sizes, index);
        score(sizes, tile, sizes.first_block, sizes.end_block, queries, keys, mask, scores, seen, scratch);
        for (int64_t row = 0; row < tile.rows; row += VALUE_ROWS)
          weigh(sizes, tile, row, scores, seen, values, outputs, weights);
      }
    } else {
      const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
      const int64_t end = tiles * num_seen * (thread + 1) / threads;
      for (int64_t at = tiles * num_seen * thread / threads; at < end;) {
        const int64_t index = at / num_seen, skipped = at % num_seen, count = std::min(num_seen - skipped, end - at);
        const int64_t first = sizes.first_block + skipped;
        const AttentionTile tile(sizes, index);
        score(
            sizes, tile, first, first + count, queries, keys, mask, all_scores + tile.offset * sizes.stride,
            all_seen + index * blocks, scratch);
        at += count;
      }
#pragma omp barrier
      const int64_t groups = (std::min<int64_t>(QUERY_ROWS, head_rows) + VALUE_ROWS - 1) / VALUE_ROWS;  // of a tile
      for (int64_t at = tiles * groups * thread / threads; at < tiles * groups * (thread + 1) / threads; ++at) {
        const int64_t index = at / groups, row = at % groups * VALUE_ROWS;
        const AttentionTile tile(sizes, index);
        if (row < tile.rows)
          weigh(
              sizes, tile, row, all_scores + tile.offset * sizes.stride, all_seen + index * blocks, values, outputs,
              weights);
      }
    }
  }
}

// ---- the most probable children ----

constexpr float HUGE_LOGIT = 1e30f;  // stands for an infinite logit; yggc/kernels/__init__.py has the same number

inline Vector finite(Vector logits) {  // a drafter that overflows drafts badly; it must not break the request
  const Vector most = broadcast(HUGE_LOGIT), least = broadcast(-HUGE_LOGIT);
  const Vector bounded = logits < most ? logits : most;
  return logits == logits ? (bounded > least ? bounded : least) : least;
}

inline bool any_above(Vector values, Vector threshold) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(values), reinterpret_cast<__m512>(threshold), _CMP_GT_OQ) != 0;
#elif defined(__AVX__)
  return _mm256_movemask_ps(
             _mm256_cmp_ps(reinterpret_cast<__m256>(values), reinterpret_cast<__m256>(threshold), _CMP_GT_OQ)) != 0;
#else
  const IntVector above = values > threshold;
  int32_t any = 0;
  for (int lane = 0; lane < LANES; ++lane) any |= above[lane];
  return any != 0;
#endif
}

// The `count` largest logits of a row, largest first, the lower column first among equals, as log probabilities.
template <class Element>
void best_of_row(const Element* logits, int64_t columns, int64_t count, int64_t* best, float* log_q) {
  std::fill_n(log_q, count, -INFINITY);
  std::fill_n(best, count, int64_t{0});
  auto offer = [&](float value, int64_t column) {
    if (value <= log_q[count - 1]) return;
    int64_t place = count - 1;
    for (; place > 0 && value > log_q[place - 1]; --place) {
      log_q[place] = log_q[place - 1];
      best[place] = best[place - 1];
    }
    log_q[place] = value;
    best[place] = column;
  };
  const int64_t whole = columns / LANES * LANES;
  float rest[LANES];
  for (int64_t column = whole; column < columns; ++column) rest[column - whole] = element(logits, column);
  std::fill(rest + (columns - whole), rest + LANES, -INFINITY);
  const Vector tail = finite(load(rest));
  for (int64_t first = 0; first < whole; first += LANES) {
    const Vector values = finite(elements(logits + first));
    if (any_above(values, broadcast(log_q[count - 1])))
      for (int lane = 0; lane < LANES; ++lane) offer(values[lane], first + lane);
  }
  for (int64_t column = whole; column < columns; ++column) offer(tail[column - whole], column);

  const Vector largest = broadcast(log_q[0]);
  Vector sums = {};
  for (int64_t first = 0; first < whole; first += LANES)
    sums += exponential(finite(elements(logits + first)) - largest);
  if (whole < columns) {
    const Vector last = exponential(tail - largest);
    for (int64_t column = whole; column < columns; ++column) sums[column - whole] += last[column - whole];
  }
  float total = 0;
  for (int lane = 0; lane < LANES; ++lane) total += sums[lane];
  const float most = log_q[0], log_total = std::log(total);
  for (int64_t place = 0; place < count; ++place) log_q[place] = (log_q[place] - most) - log_total;
}

// ---- drawing children ----

// One node's children: see yggc/kernels/__init__.py. keys is scratch for `size` numbers, order for as many indices.
inline void draw_of_row(
    const int64_t* tokens, const float* log_q, const float* noise, float temperature, int64_t size, int64_t count,
    int64_t* drawn, float* places, float* law, float* keys, int64_t* order) {
  if (!(temperature > 0)) {
    std::copy_n(tokens, count, drawn);
    std::copy_n(log_q, count, places);
    std::copy_n(log_q, size, law);
    return;
  }
  float total = 0, sureness = 0;
  for (int64_t index = 0; index < size; ++index) {
    law[index] = (log_q[index] - log_q[0]) / temperature;
    total += std::exp(law[index]);
  }
  const float log_total = std::log(total);
  for (int64_t index = 0; index < size; ++index) {
    law[index] -= log_total;
    sureness += std::exp(law[index]) * law[index];
    keys[index] = law[index] + noise[index];
    order[index] = index;
  }
  std::stable_sort(order, order + size, [keys](int64_t a, int64_t b) { return keys[a] > keys[b]; });
  for (int64_t place = 0; place < count; ++place) drawn[place] = tokens[order[place]];
  std::fill_n(places, count, sureness);
}

// ---- the law that tokens are drawn from ----

constexpr int64_t GROUP = 128;  // tokens that are looked at together before one of them is looked for

inline int64_t group_count(int64_t size) { return (size + GROUP - 1) / GROUP; }

inline float largest_of(const float* values, int64_t count) {
  float most = -INFINITY;
  int64_t at = 0;
  if (count >= LANES) {
    Vector best = load(values);
    for (at = LANES; at + LANES <= count; at += LANES) {
      const Vector here = load(values + at);
      best = here > best ? here : best;
    }
    for (int lane = 0; lane < LANES; ++lane) most = std::max(most, best[lane]);
  }
  for (; at < count; ++at) most = std::max(most, values[at]);
  return most;
}

inline float sum_of(const float* values, int64_t count) {
  Vector sums = {};
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) sums += load(values + at);
  float total = 0;
  for (int lane = 0; lane < LANES; ++lane) total += sums[lane];
  for (; at < count; ++at) total += values[at];
  return total;
}

// The least of the `count` largest values; best: the largest of every group.
float least_of_largest(
    const float* values, int64_t size, int64_t count, const std::vector<float>& best, std::vector<float>& few) {
  float bound = -INFINITY;
  const int64_t groups = static_cast<int64_t>(best.size());
  if (count <= groups) {  // as many groups reach that much
    few = best;
    std::nth_element(few.begin(), few.begin() + (count - 1), few.end(), std::greater<float>());
    bound = few[count - 1];
  }
  few.clear();
  for (int64_t group = 0; group < groups; ++group)
    if (best[group] >= bound)
      for (int64_t at = group * GROUP; at < std::min(size, (group + 1) * GROUP); ++at)
        if (values[at] >= bound) few.push_back(values[at]);
  if (static_cast<int64_t>(few.size()) < count) return -INFINITY;  // not numbers
  std::nth_element(few.begin(), few.begin() + (count - 1), few.end(), std::greater<float>());
  return few[count - 1];
}

// Keep the fewest chances, the largest first, that hold `share` of `total`; the others become 0. Returns their sum.
double keep_share(float* chances, int64_t size, double share, double total) {
  static thread_local std::vector<std::pair<float, int64_t>> likely;
  double found = 0;
  for (float bound = 0.03f;; bound *= 0.1f) {  // of the largest, which is 1
    likely.clear();
    found = 0;
    for (int64_t at = 0; at < size; ++at)
      if (chances[at] >= bound) {
        likely.emplace_back(-chances[at], at);
        found += chances[at];
      }
    if (found >= share * total || bound < 1e-30f) break;
  }
  std::sort(likely.begin(), likely.end());
  std::fill_n(chances, size, 0.0f);
  double kept = 0;
  for (const auto& [negated, at] : likely) {
    chances[at] = -negated;
    kept -= negated;
    if (kept >= share * total) break;
  }
  return kept;
}

// How a request draws; see `SamplingOptions` of yggrt/sampling.py.
struct Sampling {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
};

// A law up to a factor. Weights are made where they are needed, out of logits that stay where they are: writing them all
// down would cost as much as reading the logits.
class Law {
 public:
  double total = 0;

  void weigh(const float* values, int64_t count, const Sampling& sampling) {
    logits = values, size = count;
    sums.resize(group_count(count));
    best.resize(sums.size());
    truncated.clear();
    exchanged.clear();
    most = -INFINITY;
    for (int64_t group = 0; group < groups(); ++group) {
      prefetch(logits + group * GROUP + AHEAD / 4, GROUP);
      best[group] = largest_of(logits + group * GROUP, count_of(group));
      most = std::max(most, best[group]);
    }
    const bool has_top_k = sampling.top_k > 0 && sampling.top_k < count;
    least = has_top_k ? least_of_largest(logits, count, sampling.top_k, best, few) : -INFINITY;
    scale = static_cast<float>(1 / sampling.temperature);
    for (int64_t group = 0; group < groups(); ++group) sum_group(group);
    if (sampling.top_p < 1 || sampling.min_p > 0) truncate(sampling);
    total = sum_of_groups();
  }

  double weight(int64_t token) const {
    float weights[GROUP];
    return weigh_group(token / GROUP, weights)[token % GROUP];
  }

  // Give tokens other weights.
  void exchange(const int64_t* tokens, const std::vector<double>& weights) {
    exchanged.clear();
    for (size_t at = 0; at < weights.size(); ++at) exchanged.emplace_back(tokens[at], static_cast<float>(weights[at]));
    for (size_t at = 0; at < weights.size(); ++at) sum_group(tokens[at] / GROUP);
    total = sum_of_groups();
  }

  // The token at which the running sum passes this share of the whole.
  int64_t draw(double number) const {
    const double at = number * total;
    double before = 0;
    int64_t group = 0, last_group = 0;
    for (; group < groups(); ++group) {
      if (sums[group] > 0) last_group = group;
      if (before + sums[group] > at) break;
      before += sums[group];
    }
    if (group == groups()) group = last_group, before = at - sums[group];  // rounding left none
    float weights[GROUP];
    weigh_group(group, weights);
    int64_t last = 0;
    for (int64_t place = 0; place < count_of(group); ++place) {
      if (weights[place] > 0) last = place;
      before += weights[place];
      if (before > at) break;
    }
    return group * GROUP + last;
  }

 private:
  const float* logits = nullptr;
  int64_t size = 0;
  float most = 0, least = 0, scale = 1;  // largest logit, the least that has a chance, 1 / temperature
  std::vector<double> sums;              // of every group
  std::vector<float> best, few;
  std::vector<float> truncated;  // all weights, where top-p or min-p took some
  std::vector<std::pair<int64_t, float>> exchanged;

  int64_t groups() const { return static_cast<int64_t>(sums.size()); }
  int64_t count_of(int64_t group) const { return std::min(GROUP, size - group * GROUP); }

  // The weights of a group, [GROUP]; 0 beyond the last token.
  float* weigh_group(int64_t group, float* weights) const {
    const int64_t first = group * GROUP, count = count_of(group);
    if (!truncated.empty()) {
      std::copy_n(truncated.data() + first, count, weights);
    } else if (best[group] < least) {
      std::fill_n(weights, count, 0.0f);
    } else {
      for (int64_t at = 0; at < count; at += LANES) {
        Vector values = broadcast(-INFINITY);
        if (at + LANES <= count)
          values = load(logits + first + at);
        else
          std::memcpy(&values, logits + first + at, (count - at) * sizeof(float));
        const Vector chances = exponential((values - broadcast(most)) * scale);
        store(weights + at, values >= broadcast(least) ? chances : Vector{});
      }
    }
    std::fill(weights + count, weights + GROUP, 0.0f);
    for (const auto& [token, weight] : exchanged)
      if (token / GROUP == group) weights[token % GROUP] = weight;
    return weights;
  }

  void sum_group(int64_t group) {
    float weights[GROUP];
    sums[group] = sum_of(weigh_group(group, weights), GROUP);
  }

  double sum_of_groups() const {
    double sum = 0;
    for (const double each : sums) sum += each;
    return sum;
  }

  void truncate(const Sampling& sampling) {
    std::vector<float>& all = few;
    all.resize(groups() * GROUP);
    for (int64_t group = 0; group < groups(); ++group) weigh_group(group, all.data() + group * GROUP);
    if (sampling.top_p < 1) keep_share(all.data(), size, sampling.top_p, sum_of_groups());
    const float low = static_cast<float>(sampling.min_p);  // of the largest, which is 1
    for (float& weight : all) weight = weight < low ? 0.0f : weight;
    std::swap(truncated, all);
    for (int64_t group = 0; group < groups(); ++group) sum_group(group);
  }
};

// A tree that was drawn, and what the verifier thinks after each of its rows; see `ygg_traverse`.
struct DrawnTree {
  const float* logits;
  int64_t size;
  const int64_t *tokens, *parents, *nodes;
  int64_t width;
  const int64_t* ids;
  const float* log_q;
  int64_t drawn;
};

// The accept rule above temperature 0. Source and proof: `traverse` of yggrt/accept.py, tests/yggrt/test_sampling_law.py.
struct Traversal {
  // A node on the path that is being tried, and what is left of it after the children that were rejected.
  struct Open {
    int64_t row = 0, next = -1, place = -1;  // its next child; its own place among its siblings' tokens
    double accept = 1, scale = 1, outside = 0;
    std::vector<double> drafted, inside;
    std::vector<float> penalized;
    Law law;
  };

  DrawnTree tree;
  Sampling sampling;
  float penalty = 1;
  const int64_t* seen = nullptr;
  int64_t num_seen = 0;
  std::vector<Open> open;
  std::vector<int64_t> first, following;  // child of a row; next sibling; -1 where there is none

  int64_t run(const double* numbers, int64_t* path) {
    first.assign(tree.width, -1);
    following.assign(tree.width, -1);
    for (int64_t row = tree.width - 1; row > 0; --row) {
      following[row] = first[tree.parents[row]];
      first[tree.parents[row]] = row;
    }
    int64_t depth = 0;
    begin(depth, 0, 1.0, -1);
    while (true) {
      Open& node = open[depth];
      if (node.next >= 0) {
        const int64_t row = node.next;
        node.next = following[row];
        const int64_t place = place_of(node, tree.tokens[row]);
        if (place < 0) continue;  // dead: it had no chance of being drawn
        const double accept = std::min(1.0, node.accept * node.inside[place] / node.drafted[place]);
        if (accept > 0)
          begin(++depth, row, accept, place);
        else
          reject(node, place);
      } else if (depth == 0 || *numbers++ < node.accept) {
        for (int64_t at = 0; at <= depth; ++at) path[at] = open[at].row;
        path[depth + 1] = following_token(node, *numbers);
        return depth + 1;
      } else {
        const int64_t place = node.place;
        reject(open[--depth], place);
      }
    }
  }

  void begin(int64_t depth, int64_t row, double accept, int64_t place) {
    if (static_cast<int64_t>(open.size()) <= depth) open.resize(depth + 1);
    Open& node = open[depth];
    node.row = row, node.next = first[row], node.place = place;
    node.accept = accept, node.scale = 1;
    if (node.next < 0) return;  // a leaf's law is asked for only where the leaf is accepted
    weigh(node);
    const int64_t* ids = tree.ids + tree.nodes[row] * tree.drawn;
    const float* log_q = tree.log_q + tree.nodes[row] * tree.drawn;
    node.drafted.resize(tree.drawn);
    node.inside.resize(tree.drawn);
    double drafted = 0, inside = 0;
    for (int64_t at = 0; at < tree.drawn; ++at) {
      drafted += node.drafted[at] = std::exp(static_cast<double>(log_q[at]));
      inside += node.inside[at] = node.law.weight(ids[at]) / node.law.total;
    }
    for (double& each : node.drafted) each /= drafted;
    node.outside = std::max(0.0, 1 - inside);
  }

  int64_t place_of(const Open& node, int64_t token) const {
    const int64_t* ids = tree.ids + tree.nodes[node.row] * tree.drawn;
    const int64_t place = std::find(ids, ids + tree.drawn, token) - ids;
    return place < tree.drawn && node.drafted[place] > 0 ? place : -1;
  }

  static void reject(Open& node, int64_t place) {
    const int64_t count = static_cast<int64_t>(node.inside.size());
    const double outside = node.accept * node.outside;
    double mass = outside;
    for (int64_t at = 0; at < count; ++at)
      mass += std::max(0.0, node.accept * node.inside[at] - node.drafted[at]);
    if (mass > 0) {
      for (int64_t at = 0; at < count; ++at)
        node.inside[at] = std::max(0.0, node.accept * node.inside[at] - node.drafted[at]) / mass;
      node.outside = outside / mass;
      node.scale *= node.accept / mass;
      node.accept = mass / (mass + (1 - node.accept));
    } else {
      node.accept = 0;
    }
    if (node.next < 0) return;  // nothing is left to be drawn
    node.drafted[place] = 0;
    double remaining = 0;
    for (const double each : node.drafted) remaining += each;
    if (remaining > 0)
      for (double& each : node.drafted) each /= remaining;
  }

  // Drawn where none of the node's children is accepted.
  int64_t following_token(Open& node, double number) {
    if (first[node.row] < 0) {
      weigh(node);
      return node.law.draw(number);
    }
    const int64_t* ids = tree.ids + tree.nodes[node.row] * tree.drawn;
    const double factor = node.law.total / node.scale;
    std::vector<double> left(node.inside), before(tree.drawn);
    for (double& each : left) each *= factor;
    for (int64_t at = 0; at < tree.drawn; ++at) before[at] = node.law.weight(ids[at]);
    node.law.exchange(ids, left);
    if (!(node.law.total > 0)) node.law.exchange(ids, before);  // p and q all but equal: lost in rounding
    return node.law.draw(number);
  }

  void weigh(Open& node) {
    const float* logits = tree.logits + node.row * tree.size;
    if (penalty != 1) {
      node.penalized.assign(logits, logits + tree.size);
      for (int64_t at = 0; at < num_seen; ++at) penalize(node, logits, seen[at]);
      for (int64_t row = node.row; row > 0; row = tree.parents[row]) penalize(node, logits, tree.tokens[row]);
      logits = node.penalized.data();
    }
    node.law.weigh(logits, tree.size, sampling);
  }

  // Once, however often the token was said.
  void penalize(Open& node, const float* logits, int64_t token) const {
    node.penalized[token] = logits[token] < 0 ? logits[token] * penalty : logits[token] / penalty;
  }
};

// ---- AOTInductor's C interface ----

template <class Pointer>
Pointer pointer(AtenTensorHandle tensor) {
  void* data = nullptr;
  aoti_torch_get_data_ptr(tensor, &data);
  return static_cast<Pointer>(data);
}

int64_t size(AtenTensorHandle tensor, int64_t dim) {
  int64_t value = 0;
  aoti_torch_get_size(tensor, dim, &value);
  return value;
}

int64_t stride(AtenTensorHandle tensor, int64_t dim) {
  int64_t value = 0;
  aoti_torch_get_stride(tensor, dim, &value);
  return value;
}

int32_t dtype(AtenTensorHandle tensor) {
  int32_t value = 0;
  aoti_torch_get_dtype(tensor, &value);
  return value;
}

constexpr int64_t MAX_DIMS = 8;

// The sizes of a tensor of at most MAX_DIMS - 1 dimensions; false when it has more or is not contiguous.
bool contiguous_sizes(AtenTensorHandle tensor, int64_t* sizes, int64_t* dims) {
  aoti_torch_get_dim(tensor, dims);
  if (*dims < 1 || *dims >= MAX_DIMS) return false;
  int64_t expected = 1;
  for (int64_t dim = *dims - 1; dim >= 0; --dim) {
    sizes[dim] = size(tensor, dim);
    if (sizes[dim] != 1 && stride(tensor, dim) != expected) return false;
    expected *= sizes[dim];
  }
  return true;
}

AOTITorchError allocate(const int64_t* sizes, int64_t dims, int32_t type, AtenTensorHandle* result) {
  int64_t strides[MAX_DIMS];
  int64_t next = 1;
  for (int64_t dim = dims - 1; dim >= 0; --dim) {
    strides[dim] = next;
    next *= sizes[dim];
  }
  return aoti_torch_empty_strided(dims, sizes, strides, type, aoti_torch_device_type_cpu(), 0, result);
}

}  // namespace

#define YGG_NAME_OF(op, tag) aoti_torch_cpu_ygg_##op##_##tag
#define YGG_EXPANDED(op, tag) YGG_NAME_OF(op, tag)
#define YGG_OP(op) YGG_EXPANDED(op, YGG_TAG)

extern "C" {

// inputs [..., features] x a packed matrix [columns, features]: [..., columns] in the inputs' dtype.
AOTITorchError YGG_OP(linear)(
    AtenTensorHandle inputs, AtenTensorHandle weights, int64_t columns, int64_t format, AtenTensorHandle* result) {
  int64_t sizes[MAX_DIMS], dims = 0, rows = 1;
  if (!contiguous_sizes(inputs, sizes, &dims)) return AOTI_TORCH_FAILURE;
  for (int64_t dim = 0; dim < dims - 1; ++dim) rows *= sizes[dim];
  const int64_t features = sizes[dims - 1];
  const int32_t type = dtype(inputs);
  const bool wide_inputs = type == aoti_torch_dtype_float32();
  if (!known_format(format) || !(wide_inputs || type == aoti_torch_dtype_bfloat16())) return AOTI_TORCH_FAILURE;
  sizes[dims - 1] = columns;
  if (allocate(sizes, dims, type, result) != AOTI_TORCH_SUCCESS) return AOTI_TORCH_FAILURE;
  const uint8_t* packed = pointer<const uint8_t*>(weights);
  if (wide_inputs) {
    with_format(format, [&](auto kind) {
      multiply(kind, pointer<const float*>(inputs), rows, features, packed, columns, pointer<float*>(*result));
    });
  } else {
    static thread_local Kept<float> kept;
    float* wide = kept.at_least(rows * features);
    const uint16_t* from = pointer<const uint16_t*>(inputs);
    for (int64_t index = 0; index < rows * features; ++index) wide[index] = bfloat16_value(from[index]);
    with_format(format, [&](auto kind) {
      multiply(kind, wide, rows, features, packed, columns, pointer<uint16_t*>(*result));
    });
  }
  return AOTI_TORCH_SUCCESS;
}

// Rows `tokens` [...] of a packed matrix [?, features]: [..., features], bfloat16 when `narrow`, else float32.
AOTITorchError YGG_OP(embedding)(
    AtenTensorHandle tokens, AtenTensorHandle weights, int64_t features, int64_t format, int32_t narrow,
    AtenTensorHandle* result) {
  int64_t sizes[MAX_DIMS], dims = 0, count = 1;
  if (!contiguous_sizes(tokens, sizes, &dims) || dtype(tokens) != aoti_torch_dtype_int64() || !known_format(format))
    return AOTI_TORCH_FAILURE;
  for (int64_t dim = 0; dim < dims; ++dim) count *= sizes[dim];
  sizes[dims] = features;
  const int32_t type = narrow ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32();
  if (allocate(sizes, dims + 1, type, result) != AOTI_TORCH_SUCCESS) return AOTI_TORCH_FAILURE;
  const uint8_t* packed = pointer<const uint8_t*>(weights);
  const int64_t* ids = pointer<const int64_t*>(tokens);
  with_format(format, [&](auto kind) {
    if (narrow)
      gather<decltype(kind)>(ids, count, packed, features, pointer<uint16_t*>(*result));
    else
      gather<decltype(kind)>(ids, count, packed, features, pointer<float*>(*result));
  });
  return AOTI_TORCH_SUCCESS;
}

// The `count` best columns of logits [rows, columns]: columns int64 [rows, count] and log probabilities float32.
AOTITorchError YGG_OP(children)(
    AtenTensorHandle logits, int64_t count, AtenTensorHandle* columns, AtenTensorHandle* log_q) {
  int64_t sizes[MAX_DIMS], dims = 0;
  if (!contiguous_sizes(logits, sizes, &dims) || dims != 2 || count < 1 || sizes[1] < count) return AOTI_TORCH_FAILURE;
  const int64_t rows = sizes[0], width = sizes[1], shape[] = {rows, count};
  const int32_t type = dtype(logits);
  const bool wide = type == aoti_torch_dtype_float32();
  if (!wide && type != aoti_torch_dtype_bfloat16()) return AOTI_TORCH_FAILURE;
  if (allocate(shape, 2, aoti_torch_dtype_int64(), columns) != AOTI_TORCH_SUCCESS) return AOTI_TORCH_FAILURE;
  if (allocate(shape, 2, aoti_torch_dtype_float32(), log_q) != AOTI_TORCH_SUCCESS) return AOTI_TORCH_FAILURE;
  int64_t* best = pointer<int64_t*>(*columns);
  float* values = pointer<float*>(*log_q);
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    if (wide)
      best_of_row(pointer<const float*>(logits) + row * width, width, count, best + row * count, values + row * count);
    else
      best_of_row(
          pointer<const uint16_t*>(logits) + row * width, width, count, best + row * count, values + row * count);
  }
  return AOTI_TORCH_SUCCESS;
}

// Children of tokens int64 [rows, size] with log probabilities and noise float32 [rows, size], the most likely first, at
// temperature float32 [1]: tokens and places in the acceptance table [rows, count], and the law drawn from [rows, size].
AOTITorchError YGG_OP(draw)(
    AtenTensorHandle tokens, AtenTensorHandle log_q, AtenTensorHandle noise, AtenTensorHandle temperature, int64_t count,
    AtenTensorHandle* drawn, AtenTensorHandle* places, AtenTensorHandle* law) {
  int64_t sizes[MAX_DIMS], others[MAX_DIMS], dims = 0;
  if (!contiguous_sizes(tokens, sizes, &dims) || dims != 2 || dtype(tokens) != aoti_torch_dtype_int64() || count < 1 ||
      sizes[1] < count)
    return AOTI_TORCH_FAILURE;
  for (AtenTensorHandle other : {log_q, noise})
    if (!contiguous_sizes(other, others, &dims) || dims != 2 || others[0] != sizes[0] || others[1] != sizes[1] ||
        dtype(other) != aoti_torch_dtype_float32())
      return AOTI_TORCH_FAILURE;
  if (!contiguous_sizes(temperature, others, &dims) || dims != 1 || others[0] != 1 ||
      dtype(temperature) != aoti_torch_dtype_float32())
    return AOTI_TORCH_FAILURE;
  const int64_t rows = sizes[0], width = sizes[1], shape[] = {rows, count};
  if (allocate(shape, 2, aoti_torch_dtype_int64(), drawn) != AOTI_TORCH_SUCCESS) return AOTI_TORCH_FAILURE;
  if (allocate(shape, 2, aoti_torch_dtype_float32(), places) != AOTI_TORCH_SUCCESS) return AOTI_TORCH_FAILURE;
  if (allocate(sizes, 2, aoti_torch_dtype_float32(), law) != AOTI_TORCH_SUCCESS) return AOTI_TORCH_FAILURE;
  static thread_local Kept<float> keys;
  static thread_local Kept<int64_t> order;
  for (int64_t row = 0; row < rows; ++row)
    draw_of_row(
        pointer<const int64_t*>(tokens) + row * width, pointer<const float*>(log_q) + row * width,
        pointer<const float*>(noise) + row * width, *pointer<const float*>(temperature), width, count,
        pointer<int64_t*>(*drawn) + row * count, pointer<float*>(*places) + row * count,
        pointer<float*>(*law) + row * width, keys.at_least(width), order.at_least(width));
  return AOTI_TORCH_SUCCESS;
}

// Indices int64 [count] of values float32 [count], largest first, the earlier first among equals.
AOTITorchError YGG_OP(order)(AtenTensorHandle values, AtenTensorHandle* result) {
  int64_t sizes[MAX_DIMS], dims = 0;
  if (!contiguous_sizes(values, sizes, &dims) || dims != 1 || dtype(values) != aoti_torch_dtype_float32())
    return AOTI_TORCH_FAILURE;
  if (allocate(sizes, 1, aoti_torch_dtype_int64(), result) != AOTI_TORCH_SUCCESS) return AOTI_TORCH_FAILURE;
  const float* value = pointer<const float*>(values);
  int64_t* order = pointer<int64_t*>(*result);
  for (int64_t index = 0; index < sizes[0]; ++index) order[index] = index;
  std::stable_sort(order, order + sizes[0], [value](int64_t a, int64_t b) { return value[a] > value[b]; });
  return AOTI_TORCH_SUCCESS;
}

// queries [heads, width, key_dim] (any strides but the last), keys and values [kv_heads, extent, dim] (heads any distance
// apart), mask [width, extent]: [width, heads, value_dim].
AOTITorchError YGG_OP(attention)(
    AtenTensorHandle queries, AtenTensorHandle keys, AtenTensorHandle values, AtenTensorHandle mask, double scale,
    AtenTensorHandle* result) {
  AttentionSizes sizes;
  sizes.heads = size(queries, 0);
  sizes.width = size(queries, 1);
  sizes.key_dim = size(queries, 2);
  sizes.kv_heads = size(keys, 0);
  sizes.key_head = stride(keys, 0);
  sizes.value_head = stride(values, 0);
  sizes.value_dim = size(values, 2);
  sizes.extent = size(mask, 1);
  sizes.query_head = stride(queries, 0);
  sizes.query_row = stride(queries, 1);
  sizes.mask_row = stride(mask, 0);
  sizes.scale = static_cast<float>(scale);
  const int32_t type = dtype(queries);
  const bool dense = stride(queries, 2) == 1 && stride(mask, 1) == 1 && stride(keys, 2) == 1 &&
                     stride(keys, 1) == sizes.key_dim && stride(values, 2) == 1 && stride(values, 1) == sizes.value_dim;
  const bool fits = size(keys, 1) >= sizes.extent && size(values, 1) >= sizes.extent &&
                    size(values, 0) == sizes.kv_heads && size(keys, 2) == sizes.key_dim &&
                    size(mask, 0) == sizes.width && sizes.heads % sizes.kv_heads == 0;
  const bool wide = type == aoti_torch_dtype_float32();
  if (!dense || !fits || dtype(keys) != type || dtype(values) != type || dtype(mask) != type ||
      !(wide || type == aoti_torch_dtype_bfloat16()))
    return AOTI_TORCH_FAILURE;
  const int64_t shape[] = {sizes.width, sizes.heads, sizes.value_dim};
  if (allocate(shape, 3, type, result) != AOTI_TORCH_SUCCESS) return AOTI_TORCH_FAILURE;
  if (wide)
    attend(sizes, pointer<const float*>(queries), pointer<const float*>(keys), pointer<const float*>(values),
           pointer<const float*>(mask), pointer<float*>(*result));
  else
    attend(sizes, pointer<const uint16_t*>(queries), pointer<const uint16_t*>(keys),
           pointer<const uint16_t*>(values), pointer<const uint16_t*>(mask), pointer<uint16_t*>(*result));
  return AOTI_TORCH_SUCCESS;
}

// A token drawn from a request's law, see `law` and `draw` of yggrt/sampling.py. logits: float32 [size]; top_k 0, top_p 1
// and min_p 0 do nothing; number: float64 [1], from 0 below 1.
int64_t ygg_choose(
    const float* logits, int64_t size, double temperature, int64_t top_k, double top_p, double min_p, const double* number) {
  static thread_local Law law;
  law.weigh(logits, size, {temperature, top_k, top_p, min_p});
  return law.draw(*number);
}

// The rows accepted of a tree that was drawn, and after them the token that follows, see `traverse` of yggrt/accept.py.
// logits: float32 [width, size]; rows: int64 [3, width], tokens, parents and nodes; ids and log_q [nodes, drawn], what a
// node's children were drawn from; seen: tokens that the penalty holds for besides a row's own path; numbers: float64
// [width], of the coins and of the last draw. path: int64 [width + 1]. Returns how many rows were accepted.
int64_t ygg_traverse(
    const float* logits, int64_t size, const int64_t* rows, int64_t width, const int64_t* ids, const float* log_q,
    int64_t drawn, double temperature, int64_t top_k, double top_p, double min_p, double penalty, const int64_t* seen,
    int64_t num_seen, const double* numbers, int64_t* path) {
  static thread_local Traversal traversal;
  traversal.tree = {logits, size, rows, rows + width, rows + 2 * width, width, ids, log_q, drawn};
  traversal.sampling = {temperature, top_k, top_p, min_p};
  traversal.penalty = static_cast<float>(penalty);
  traversal.seen = seen, traversal.num_seen = num_seen;
  return traversal.run(numbers, path);
}

}  // extern "C"
