// GEMMs for few rows with quantised and bfloat16 weights, decode attention over pages, and the operations between them, on a CPU, as
// PyTorch operations in the namespace encore_cpu.
//
// cpu_library.py compiles this file on the machine that runs it, against PyTorch's stable ABI. GEMMs with quantised
// weights compute 16 outputs in the 16 lanes of a vector. All accumulate over the inputs in float32, in one order that
// depends neither on the number of rows nor on the number of threads: a row's result is the same bits in any batch.
//
// The compiler's flags choose the form: AVX-512 with or without BF16, or AVX2.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define ENCORE_BFLOAT16_PAIRS 1
#else
#define ENCORE_BFLOAT16_PAIRS 0
#endif

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

constexpr int64_t LANES = 16;  // outputs of a block
constexpr int64_t GROUP = 32;  // inputs that share a scale
#if defined(__AVX512F__)
constexpr int64_t TILE = 8;  // rows of x whose sums are in registers at a time
constexpr int64_t WIDE = 4;  // vectors of a value whose sums are in registers at a time, for up to 4 queries
constexpr int OUTPUTS = 4;   // of a dense weight whose sums are in registers at a time, for up to 4 rows of x
#else
constexpr int64_t TILE = 4;
constexpr int64_t WIDE = 1;
constexpr int OUTPUTS = 1;
#endif
constexpr int64_t GRAIN = 1 << 16;  // weights for which a thread is worth its start
constexpr int64_t SPAN = 512;       // tokens that a thread attends to at a time
constexpr int64_t TOKENS_AHEAD = 32;  // keys to prefetch
constexpr int64_t AHEAD = 8192;  // bytes of a weight to prefetch: a tenth faster than the CPU's own choice

inline float to_float(uint16_t bfloat16) {
  const uint32_t bits = uint32_t(bfloat16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Round to the nearest bfloat16, ties to even; a NaN stays one.
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return uint16_t((is_nan ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// 16 float32 numbers, and how they are made of 16 stored ones. `codes<j>` are the j-th 4 bits of 16 words, less 8.
#if defined(__AVX512F__)
struct Floats {
  __m512 v;

  Floats() : v(_mm512_setzero_ps()) {}
  explicit Floats(__m512 v) : v(v) {}
  static Floats load(const float* from) { return Floats(_mm512_loadu_ps(from)); }
  static Floats from_int8(const char* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return Floats(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
  }
  static Floats from_float16(const char* from) {
    return Floats(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
  }
  static Floats from_bfloat16(const uint16_t* from) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return Floats(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)));
  }
  static Floats low_bfloat16(const char* pairs) {
    return Floats(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16)));
  }
  static Floats high_bfloat16(const char* pairs) {
    const __m512i high = _mm512_and_si512(_mm512_loadu_si512(pairs), _mm512_set1_epi32(int32_t(0xffff0000)));
    return Floats(_mm512_castsi512_ps(high));
  }
  template <int J>
  static Floats codes(const char* words) {
    const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return Floats(_mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(words), 4 * J), table));
  }
  void add_product(Floats a, Floats b) { v = _mm512_fmadd_ps(a.v, b.v, v); }
  void add_product(Floats a, float b) { v = _mm512_fmadd_ps(a.v, _mm512_set1_ps(b), v); }
  void raise_to(Floats a) { v = _mm512_max_ps(v, a.v); }
#if ENCORE_BFLOAT16_PAIRS
  // Add the products of 16 pairs of bfloat16 numbers and one pair.
  void add_pairs(__m512i pairs, const uint16_t* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof(both));
    v = _mm512_dpbf16_ps(v, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(both));
  }
#endif
  void store(float* to) const { _mm512_storeu_ps(to, v); }
};
#elif defined(__AVX2__)
struct Floats {
  __m256 a, b;

  Floats() : a(_mm256_setzero_ps()), b(_mm256_setzero_ps()) {}
  Floats(__m256 a, __m256 b) : a(a), b(b) {}
  static __m256i integers(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static __m128i half_integers(const char* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  static Floats from_int8(const char* from) {
    const __m128i bytes = half_integers(from);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
  }
  static Floats from_float16(const char* from) {
    return {_mm256_cvtph_ps(half_integers(from)), _mm256_cvtph_ps(half_integers(from + 16))};
  }
  static __m256 widened(const uint16_t* from) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  static Floats from_bfloat16(const uint16_t* from) { return {widened(from), widened(from + 8)}; }
  static __m256 low(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
  static __m256 high(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xffff0000))));
  }
  static Floats low_bfloat16(const char* pairs) { return {low(integers(pairs)), low(integers(pairs + 32))}; }
  static Floats high_bfloat16(const char* pairs) { return {high(integers(pairs)), high(integers(pairs + 32))}; }
  template <int J>
  static __m256 half_codes(__m256i words) {
    const __m256i codes = _mm256_and_si256(_mm256_srli_epi32(words, 4 * J), _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(8)));
  }
  template <int J>
  static Floats codes(const char* words) {
    return {half_codes<J>(integers(words)), half_codes<J>(integers(words + 32))};
  }
  void add_product(Floats x, Floats y) { a = _mm256_fmadd_ps(x.a, y.a, a), b = _mm256_fmadd_ps(x.b, y.b, b); }
  void add_product(Floats x, float y) { add_product(x, {_mm256_set1_ps(y), _mm256_set1_ps(y)}); }
  void raise_to(Floats x) { a = _mm256_max_ps(a, x.a), b = _mm256_max_ps(b, x.b); }
  void store(float* to) const { _mm256_storeu_ps(to, a), _mm256_storeu_ps(to + 8, b); }
};
#else
#error the flags must choose AVX2 or AVX-512
#endif

// The sum of 16 numbers, halves first.
inline float total(Floats values) {
#if defined(__AVX512F__)
  const __m256 low = _mm512_castps512_ps256(values.v), high = _mm512_extractf32x8_ps(values.v, 1);
  const __m256 half = _mm256_add_ps(low, high);
#else
  const __m256 half = _mm256_add_ps(values.a, values.b);
#endif
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

// e^x for x <= 0, to 2^-22 of it: 2^n by the exponent's bits, 2^f for |f| <= 1/2 by its series.
inline float exponential(float x) {
  constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const float power = std::max(x * 1.44269504f, -126.0f), rounded = power + ROUND;
  const float f = (power - (rounded - ROUND)) * 0.69314718f;
  const float series = 1 + f * (1 + f * (0.5f + f * (1.f / 6 + f * (1.f / 24 + f * (1.f / 120 + f * (1.f / 720))))));
  int32_t bits, n;
  std::memcpy(&bits, &series, sizeof(bits));
  std::memcpy(&n, &rounded, sizeof(n));
  bits += int32_t(uint32_t(n) << 23);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(std::string("encore_cpu: ") + what);
}

struct Matrix {  // a 2-D tensor whose rows are contiguous
  char* data;
  int64_t rows, columns, stride;

  Matrix(const Tensor& tensor, ScalarType type, const char* what) {
    require(tensor.dim() == 2 && tensor.scalar_type() == type && tensor.is_cpu() &&
                (tensor.stride(1) == 1 || tensor.size(1) <= 1), what);
    data = static_cast<char*>(tensor.data_ptr());
    rows = tensor.size(0), columns = tensor.size(1), stride = tensor.stride(0);
  }
};

const char* dense(const Tensor& tensor, ScalarType type, int64_t numbers, const char* what) {
  require(tensor.scalar_type() == type && tensor.is_cpu() && tensor.is_contiguous() && tensor.numel() == numbers, what);
  return static_cast<const char*>(tensor.data_ptr());
}

// Rows of x as the kernels read them: bfloat16 as it is, float32 copies, and float32 sums over each group.
struct Rows {
  int64_t inputs;
  const uint16_t* x[TILE];
  std::vector<float> values, sums;

  explicit Rows(int64_t inputs) : inputs(inputs), values(TILE * inputs), sums(TILE * inputs / GROUP) {}

  void set(const Matrix& from, int64_t first, int64_t count) {
    for (int64_t m = 0; m < count; m++) {
      x[m] = reinterpret_cast<const uint16_t*>(from.data) + (first + m) * from.stride;
      float* row = &values[m * inputs];
      for (int64_t k = 0; k < inputs; k++) row[k] = to_float(x[m][k]);
      for (int64_t g = 0; g < inputs / GROUP; g++) {
        Floats both = Floats::load(row + g * GROUP);
        both.add_product(Floats::load(row + g * GROUP + LANES), 1.0f);
        sums[m * (inputs / GROUP) + g] = total(both);
      }
    }
  }
};

// A group of a block of a 4-bit weight is 16 32-bit words, one an output, for each 8 inputs k: the low half of a word
// has the codes of the even k, the high half those of the odd k, in order from the lowest 4 bits on.
template <int M>
inline void int4_block(const Rows& rows, const char* packed, const char* scales, Floats* sums) {
  const int64_t groups = rows.inputs / GROUP;
  for (int m = 0; m < M; m++) sums[m] = Floats();
#if ENCORE_BFLOAT16_PAIRS
  // vpermw ignores the high bits of an index but one: the table of codes less 8 in bfloat16 is there twice.
  alignas(64) static constexpr uint16_t TABLE[32] = {
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
      0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
      0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  const __m512i table = _mm512_load_si512(TABLE);
#endif
  for (int64_t g = 0; g < groups; g++, scales += 4 * LANES) {
    Floats part[M], other[M];  // two chains of sums: the CPU waits for one
    for (int64_t k = g * GROUP; k < (g + 1) * GROUP; k += 8, packed += 4 * LANES) {
      _mm_prefetch(packed + AHEAD, _MM_HINT_T0);
#if ENCORE_BFLOAT16_PAIRS
      const __m512i words = _mm512_loadu_si512(packed);
      const auto add = [&](Floats* to, __m512i shifted, int64_t first) {
        const __m512i codes = _mm512_permutexvar_epi16(shifted, table);
        for (int m = 0; m < M; m++) to[m].add_pairs(codes, rows.x[m] + first);
      };
      add(part, words, k);
      add(other, _mm512_srli_epi16(words, 4), k + 2);
      add(part, _mm512_srli_epi16(words, 8), k + 4);
      add(other, _mm512_srli_epi16(words, 12), k + 6);
#else
      const auto add = [&](Floats* to, Floats codes, int64_t at) {
        for (int m = 0; m < M; m++) to[m].add_product(codes, rows.values[m * rows.inputs + at]);
      };
      add(part, Floats::codes<0>(packed), k), add(other, Floats::codes<4>(packed), k + 1);
      add(part, Floats::codes<1>(packed), k + 2), add(other, Floats::codes<5>(packed), k + 3);
      add(part, Floats::codes<2>(packed), k + 4), add(other, Floats::codes<6>(packed), k + 5);
      add(part, Floats::codes<3>(packed), k + 6), add(other, Floats::codes<7>(packed), k + 7);
#endif
    }
    const Floats scale = Floats::low_bfloat16(scales), zero = Floats::high_bfloat16(scales);
    for (int m = 0; m < M; m++) {
      part[m].add_product(other[m], 1.0f);
      sums[m].add_product(scale, part[m]);
      sums[m].add_product(zero, rows.sums[m * groups + g]);
    }
  }
}

// A group of SIZE inputs of a block of an 8-bit weight has 16 codes, one an output, for each input. The products are
// exact in float32, and the codes in bfloat16.
template <int M, int64_t SIZE>
inline void int8_block(const Rows& rows, const char* codes, const char* scales, Floats* sums) {
  for (int m = 0; m < M; m++) sums[m] = Floats();
  for (int64_t first = 0; first < rows.inputs; first += SIZE, scales += 2 * LANES) {
    Floats part[M], other[M];
    for (int64_t k = first; k < first + SIZE; k += 4, codes += 4 * LANES) {
      _mm_prefetch(codes + AHEAD, _MM_HINT_T0);
      const auto add = [&](Floats* to, const char* some, int64_t at) {
        const Floats even = Floats::from_int8(some), odd = Floats::from_int8(some + LANES);
#if ENCORE_BFLOAT16_PAIRS
        const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.v), 16);
        const __m512i pairs = _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_castps_si512(odd.v));
        for (int m = 0; m < M; m++) to[m].add_pairs(pairs, rows.x[m] + at);
#else
        for (int m = 0; m < M; m++) {
          to[m].add_product(even, rows.values[m * rows.inputs + at]);
          to[m].add_product(odd, rows.values[m * rows.inputs + at + 1]);
        }
#endif
      };
      add(part, codes, k);
      add(other, codes + 2 * LANES, k + 2);
    }
    const Floats scale = Floats::from_float16(scales);
    for (int m = 0; m < M; m++) {
      part[m].add_product(other[m], 1.0f);
      sums[m].add_product(scale, part[m]);
    }
  }
}

// Call block(rows of x, index of a block, sums) for each tile of rows and each block of 16 outputs, and write(row,
// first output, its 16 sums) with the results. Threads share the blocks.
template <class Block, class Write>
void for_each_block(const Matrix& x, int64_t blocks, const Block& block, const Write& write) {
  const int64_t grain = std::max<int64_t>(1, GRAIN / (LANES * std::max<int64_t>(1, x.columns)));
  torch::stable::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    thread_local std::optional<Rows> kept;
    if (!kept || kept->inputs != x.columns) kept.emplace(x.columns);
    Rows& rows = *kept;
    for (int64_t first = 0; first < x.rows; first += TILE) {
      const int64_t count = std::min(TILE, x.rows - first);
      rows.set(x, first, count);
      for (int64_t b = begin; b < end; b++) {
        Floats sums[TILE];
        switch (count) {
          case 1: block(std::integral_constant<int, 1>{}, rows, b, sums); break;
          case 2: block(std::integral_constant<int, 2>{}, rows, b, sums); break;
          case 3: block(std::integral_constant<int, 3>{}, rows, b, sums); break;
#if defined(__AVX512F__)
          case 4: block(std::integral_constant<int, 4>{}, rows, b, sums); break;
          case 5: block(std::integral_constant<int, 5>{}, rows, b, sums); break;
          case 6: block(std::integral_constant<int, 6>{}, rows, b, sums); break;
          case 7: block(std::integral_constant<int, 7>{}, rows, b, sums); break;
#endif
          default: block(std::integral_constant<int, TILE>{}, rows, b, sums);
        }
        for (int64_t m = 0; m < count; m++) {
          float results[LANES];
          sums[m].store(results);
          write(first + m, b * LANES, results);
        }
      }
    }
  });
}

// out [M, N] bfloat16 = x [M, K] bfloat16 times the transposed 4-bit weight, plus bias [N] bfloat16.
void int4_linear(Tensor out, Tensor x, Tensor packed, Tensor scales, std::optional<Tensor> bias) {
  const Matrix from(x, ScalarType::BFloat16, "x must be a bfloat16 matrix with contiguous rows");
  const Matrix to(out, ScalarType::BFloat16, "out must be a bfloat16 matrix with contiguous rows");
  const int64_t inputs = from.columns, outputs = to.columns;
  require(to.rows == from.rows && inputs % GROUP == 0 && outputs % LANES == 0, "sizes of x and out don't fit 4 bits");
  const char* codes = dense(packed, ScalarType::Byte, outputs * inputs / 2, "packed codes don't fit x and out");
  const char* pairs = dense(scales, ScalarType::BFloat16, outputs * inputs / GROUP * 2, "scales don't fit x and out");
  const uint16_t* offsets = nullptr;
  if (bias) {
    const char* data = dense(*bias, ScalarType::BFloat16, outputs, "bias doesn't fit out");
    offsets = reinterpret_cast<const uint16_t*>(data);
  }
  for_each_block(
      from, outputs / LANES,
      [&](auto count, const Rows& rows, int64_t b, Floats* sums) {
        int4_block<count()>(rows, codes + b * LANES * inputs / 2, pairs + b * LANES * inputs / GROUP * 4, sums);
      },
      [&](int64_t row, int64_t first, float* sums) {
        uint16_t* target = reinterpret_cast<uint16_t*>(to.data) + row * to.stride + first;
        if (offsets)
          for (int64_t i = 0; i < LANES; i++) sums[i] += to_float(offsets[first + i]);
        for (int64_t i = 0; i < LANES; i++) target[i] = to_bfloat16(sums[i]);
      });
}

// How many inputs share a float16 scale of an 8-bit weight: 16 or 32.
int64_t group_size(const Tensor& codes, const Tensor& scales) {
  const int64_t size = scales.numel() > 0 ? codes.numel() / scales.numel() : GROUP;
  require(size == GROUP || size == GROUP / 2, "scales don't fit codes");
  dense(scales, ScalarType::Half, codes.numel() / size, "scales don't fit codes");
  return size;
}

// out [M, N] float32 = x [M, K] bfloat16 times the transposed 8-bit weight, whose blocks may have more rows than N.
void int8_linear(Tensor out, Tensor x, Tensor codes, Tensor scales) {
  const Matrix from(x, ScalarType::BFloat16, "x must be a bfloat16 matrix with contiguous rows");
  const Matrix to(out, ScalarType::Float, "out must be a float32 matrix with contiguous rows");
  const int64_t inputs = from.columns, outputs = to.columns, blocks = (outputs + LANES - 1) / LANES;
  require(to.rows == from.rows && inputs % GROUP == 0, "sizes of x and out don't fit 8 bits");
  const char* bytes = dense(codes, ScalarType::Char, blocks * LANES * inputs, "codes don't fit x and out");
  const int64_t size = group_size(codes, scales);
  const char* halves = static_cast<const char*>(scales.data_ptr());
  for_each_block(
      from, blocks,
      [&](auto count, const Rows& rows, int64_t b, Floats* sums) {
        const char *some = bytes + b * LANES * inputs, *theirs = halves + b * LANES * inputs / size * 2;
        if (size == GROUP)
          int8_block<count(), GROUP>(rows, some, theirs, sums);
        else
          int8_block<count(), GROUP / 2>(rows, some, theirs, sums);
      },
      [&](int64_t row, int64_t first, float* sums) {
        float* target = reinterpret_cast<float*>(to.data) + row * to.stride + first;
        std::memcpy(target, sums, sizeof(float) * std::min(LANES, outputs - first));
      });
}

// out [T, K] bfloat16 = the rows ids [T] int64 of an 8-bit weight.
void int8_rows(Tensor out, Tensor ids, Tensor codes, Tensor scales) {
  const Matrix to(out, ScalarType::BFloat16, "out must be a bfloat16 matrix with contiguous rows");
  const int64_t inputs = to.columns;
  require(inputs > 0 && inputs % GROUP == 0, "the width of out doesn't fit 8 bits");
  const auto* rows = reinterpret_cast<const int64_t*>(dense(ids, ScalarType::Long, to.rows, "ids don't fit out"));
  const int64_t stored = codes.numel() / inputs;
  const char* bytes = dense(codes, ScalarType::Char, stored * inputs, "codes don't fit out");
  const int64_t size = group_size(codes, scales);
  const char* halves = static_cast<const char*>(scales.data_ptr());
  for (int64_t t = 0; t < to.rows; t++) {
    require(rows[t] >= 0 && rows[t] < stored, "index out of range");
    const int64_t b = rows[t] / LANES, lane = rows[t] % LANES;
    uint16_t* target = reinterpret_cast<uint16_t*>(to.data) + t * to.stride;
    for (int64_t g = 0; g < inputs / size; g++) {
      float scale[LANES];
      Floats::from_float16(halves + 2 * LANES * (b * inputs / size + g)).store(scale);
      for (int64_t k = g * size; k < (g + 1) * size; k++)
        target[k] = to_bfloat16(scale[lane] * float(int8_t(bytes[(b * inputs + k) * LANES + lane])));
    }
  }
}

// The products of R rows of a bfloat16 weight and M rows of x, summed over the inputs: sums[m * LANES + r], of which the
// 16 numbers are to be added.
template <int R, int M>
void dense_block(const uint16_t* weight, int64_t weight_stride, const uint16_t* x, int64_t x_stride, int64_t inputs,
                 Floats* sums) {
  Floats part[R][M];
  int64_t k = 0;
#if ENCORE_BFLOAT16_PAIRS
  const auto add = [&](__mmask32 mask) {
    __m512bh rows[M];
    for (int m = 0; m < M; m++) rows[m] = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + m * x_stride + k);
    for (int r = 0; r < R; r++) {
      const uint16_t* from = weight + r * weight_stride + k;
      _mm_prefetch(reinterpret_cast<const char*>(from) + AHEAD, _MM_HINT_T0);
      const __m512bh some = (__m512bh)_mm512_maskz_loadu_epi16(mask, from);
      for (int m = 0; m < M; m++) part[r][m].v = _mm512_dpbf16_ps(part[r][m].v, some, rows[m]);
    }
  };
  for (; inputs - k >= 2 * LANES; k += 2 * LANES) add(0xffffffff);
  if (k < inputs) add((1u << (inputs - k)) - 1);
#else
  const auto add = [&](const uint16_t* from, int64_t from_stride, const uint16_t* rows, int64_t rows_stride) {
    for (int r = 0; r < R; r++) {
      const Floats some = Floats::from_bfloat16(from + r * from_stride);
      for (int m = 0; m < M; m++) part[r][m].add_product(some, Floats::from_bfloat16(rows + m * rows_stride));
    }
  };
  for (; inputs - k >= LANES; k += LANES) add(weight + k, weight_stride, x + k, x_stride);
  if (k < inputs) {
    uint16_t from[R * LANES] = {}, rows[M * LANES] = {};  // padded with zeros
    for (int r = 0; r < R; r++) std::copy_n(weight + r * weight_stride + k, inputs - k, from + r * LANES);
    for (int m = 0; m < M; m++) std::copy_n(x + m * x_stride + k, inputs - k, rows + m * LANES);
    add(from, LANES, rows, LANES);
  }
#endif
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++) sums[m * LANES + r] = part[r][m];
}

// The totals of 16 vectors.
inline void totals(const Floats* values, float* to) {
#if defined(__AVX512F__)
  __m512 pairs[8], fours[4];  // of each 128 bits: of 2 vectors the sums of 2 numbers, of 4 vectors those of all 4
  for (int i = 0; i < 8; i++) {
    const __m512 a = values[2 * i].v, b = values[2 * i + 1].v;
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  for (int i = 0; i < 4; i++) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto fold = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  _mm512_storeu_ps(to, fold(fold(fours[0], fours[1]), fold(fours[2], fours[3])));
#else
  for (int64_t i = 0; i < LANES; i++) to[i] = total(values[i]);
#endif
}

// out [M, N] bfloat16 or float32 = x [M, K] bfloat16 times the transposed weight [N, K] bfloat16, plus bias [N] bfloat16.
void dense_linear(Tensor out, Tensor x, Tensor weight, std::optional<Tensor> bias) {
  const bool rounds = out.scalar_type() == ScalarType::BFloat16;
  const Matrix to(out, rounds ? ScalarType::BFloat16 : ScalarType::Float, "out must be a bfloat16 or float32 matrix");
  const Matrix from(x, ScalarType::BFloat16, "x must be a bfloat16 matrix with contiguous rows");
  const Matrix by(weight, ScalarType::BFloat16, "the weight must be a bfloat16 matrix with contiguous rows");
  require(to.rows == from.rows && to.columns == by.rows && by.columns == from.columns,
          "sizes of out, x and the weight don't fit each other");
  const uint16_t* offsets = nullptr;
  if (bias) offsets = (const uint16_t*)dense(*bias, ScalarType::BFloat16, by.rows, "bias doesn't fit out");
  const auto* weights = reinterpret_cast<const uint16_t*>(by.data);
  // The results of up to 16 outputs and M rows.
  const auto tile = [&](auto count, int64_t output, int64_t outputs, int64_t row) {
    constexpr int M = count();
    Floats sums[M * LANES];
    const auto* rows = reinterpret_cast<const uint16_t*>(from.data) + row * from.stride;
    int64_t r = 0;
    for (; outputs - r >= OUTPUTS; r += OUTPUTS)
      dense_block<OUTPUTS, M>(weights + (output + r) * by.stride, by.stride, rows, from.stride, by.columns, sums + r);
    for (; r < outputs; r++)
      dense_block<1, M>(weights + (output + r) * by.stride, by.stride, rows, from.stride, by.columns, sums + r);
    for (int m = 0; m < M; m++) {
      float found[LANES];
      totals(sums + m * LANES, found);
      if (offsets)
        for (int64_t i = 0; i < outputs; i++) found[i] += to_float(offsets[output + i]);
      const int64_t at = (row + m) * to.stride + output;
      if (rounds)
        for (int64_t i = 0; i < outputs; i++) reinterpret_cast<uint16_t*>(to.data)[at + i] = to_bfloat16(found[i]);
      else
        std::copy(found, found + outputs, reinterpret_cast<float*>(to.data) + at);
    }
  };
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, LANES * by.columns));
  torch::stable::parallel_for(0, (by.rows + LANES - 1) / LANES, grain, [&](int64_t begin, int64_t end) {
    for (int64_t output = begin * LANES; output < std::min(by.rows, end * LANES); output += LANES) {
      const int64_t outputs = std::min(LANES, by.rows - output);
      for (int64_t row = 0; row < from.rows; row += 4) {
        switch (from.rows - row) {
          case 1: tile(std::integral_constant<int, 1>{}, output, outputs, row); break;
          case 2: tile(std::integral_constant<int, 2>{}, output, outputs, row); break;
          case 3: tile(std::integral_constant<int, 3>{}, output, outputs, row); break;
          default: tile(std::integral_constant<int, 4>{}, output, outputs, row);
        }
      }
    }
  });
}

// Heads [T, heads, D] bfloat16 of a projection: the heads of a row are contiguous.
struct Heads {
  const uint16_t* data;
  int64_t rows, heads, size, stride;

  Heads(const Tensor& tensor, const char* what) {
    require(tensor.dim() == 3 && tensor.scalar_type() == ScalarType::BFloat16 && tensor.is_cpu() &&
                tensor.stride(2) == 1 && tensor.stride(1) == tensor.size(2), what);
    data = static_cast<const uint16_t*>(tensor.data_ptr());
    rows = tensor.size(0), heads = tensor.size(1), size = tensor.size(2), stride = tensor.stride(0);
  }
};

// What a query attends to within a span of tokens: its highest score, the sum of e^(score - highest), and the sum of
// values with these weights, which follow.
struct Part {
  float highest, weights;
};

inline void prefetch(const uint16_t* from, int64_t size) {
  for (int64_t i = 0; i < size; i += 32) _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T0);
}

// scores [M, padded] float32 of M queries and the keys at `places`, times `scale`. Prefetches the values too: the CPU
// can't foresee an order of pages.
template <int M>
void score(const uint16_t* q, const uint16_t* keys, const uint16_t* values, const std::vector<int64_t>& places,
           int64_t size, float scale, int64_t padded, float* scores) {
  const int64_t length = places.size();
  for (int64_t t = 0; t < std::min(length, TOKENS_AHEAD); t++) prefetch(keys + places[t], size);
  for (int64_t t = 0; t < length; t++) {
    const uint16_t* key = keys + places[t];
    if (t + TOKENS_AHEAD < length) prefetch(keys + places[t + TOKENS_AHEAD], size);
    prefetch(values + places[t], size);
    Floats products[M];
#if ENCORE_BFLOAT16_PAIRS
    for (int64_t d = 0; d < size; d += 2 * LANES) {
      const __mmask32 mask = size - d >= 2 * LANES ? 0xffffffff : 0xffff;
      const __m512bh some = (__m512bh)_mm512_maskz_loadu_epi16(mask, key + d);
      for (int m = 0; m < M; m++) {
        const __m512bh query = (__m512bh)_mm512_maskz_loadu_epi16(mask, q + m * size + d);
        products[m].v = _mm512_dpbf16_ps(products[m].v, some, query);
      }
    }
#else
    for (int64_t d = 0; d < size; d += LANES) {
      const Floats some = Floats::from_bfloat16(key + d);
      for (int m = 0; m < M; m++) products[m].add_product(some, Floats::from_bfloat16(q + m * size + d));
    }
#endif
    for (int m = 0; m < M; m++) scores[m * padded + t] = total(products[m]) * scale;
  }
}

// Replace scores by e^(score - highest), and numbers behind them by 0 up to a multiple of 16.
inline Part soften(float* scores, int64_t length, int64_t padded) {
  std::fill(scores + length, scores + padded, scores[0]);
  Floats highest = Floats::load(scores);
  for (int64_t t = LANES; t < padded; t += LANES) highest.raise_to(Floats::load(scores + t));
  float lanes[LANES];
  highest.store(lanes);
  const float most = *std::max_element(lanes, lanes + LANES);
  for (int64_t t = 0; t < padded; t++) scores[t] = exponential(scores[t] - most);
  std::fill(scores + length, scores + padded, 0.0f);
  Floats sums;
  for (int64_t t = 0; t < padded; t += LANES) sums.add_product(Floats::load(scores + t), 1.0f);
  return {most, total(sums)};
}

// Sum C vectors of the values at `places`, from `values` on, with M queries' weights: out [M, stride].
template <int M, int C>
void mix(const uint16_t* values, const std::vector<int64_t>& places, const float* weights, int64_t padded, float* out,
         int64_t stride) {
  const int64_t length = places.size();
  Floats mixed[M][C];
  for (int64_t t = 0; t < length; t++) {
    for (int c = 0; c < C; c++) {
      const Floats value = Floats::from_bfloat16(values + places[t] + c * LANES);
      for (int m = 0; m < M; m++) mixed[m][c].add_product(value, weights[m * padded + t]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) mixed[m][c].store(out + m * stride + c * LANES);
}

// Attend with M queries of one KV head to the keys and values at `places`, offsets in the pages. A query's part and its
// `size` values take `stride` numbers at `out`.
template <int M>
void attend(const uint16_t* q, const uint16_t* keys, const uint16_t* values, const std::vector<int64_t>& places,
            int64_t size, float scale, std::vector<float>& scratch, float* out, int64_t stride) {
  const int64_t length = places.size(), padded = (length + LANES - 1) / LANES * LANES;
  scratch.resize(M * padded);
  float* scores = scratch.data();
  score<M>(q, keys, values, places, size, scale, padded, scores);
  for (int m = 0; m < M; m++) {
    const Part part = soften(scores + m * padded, length, padded);
    std::memcpy(out + m * stride, &part, sizeof(part));
  }
  float* sums = out + sizeof(Part) / sizeof(float);
  int64_t d = 0;
  for (; size - d >= WIDE * LANES; d += WIDE * LANES) mix<M, WIDE>(values + d, places, scores, padded, sums + d, stride);
  for (; d < size; d += LANES) mix<M, 1>(values + d, places, scores, padded, sums + d, stride);
}

// out [size] bfloat16: the values of a query's parts, `step` numbers apart, together.
void merge(const float* parts, int64_t count, int64_t step, int64_t size, std::vector<float>& sums, uint16_t* out) {
  constexpr int64_t HEAD = sizeof(Part) / sizeof(float);
  float highest = parts[0], weights = 0;
  for (int64_t s = 1; s < count; s++) highest = std::max(highest, parts[s * step]);
  sums.assign(size, 0.0f);
  for (int64_t s = 0; s < count; s++) {
    const float* part = parts + s * step;
    const float factor = exponential(part[0] - highest);
    weights += factor * part[1];
    for (int64_t d = 0; d < size; d++) sums[d] += factor * part[HEAD + d];
  }
  for (int64_t d = 0; d < size; d++) out[d] = to_bfloat16(sums[d] / weights);
}

// Append k and v [T, KV, D] to pages [pages, page size, KV, D], each row at its position of its sequence's page table,
// and attend: out [T, H * D] for q [T, H, D]. tables [entries, P], rows and positions [T] int64. A window of 0: none.
// Threads share the rows, the KV heads and the spans of tokens; the last depend on a row's tokens alone, so its result
// is the same bits in any batch.
void paged_decode(Tensor out, Tensor k_pages, Tensor v_pages, Tensor q, Tensor k, Tensor v, Tensor tables, Tensor rows,
                  Tensor positions, double scale, int64_t window) {
  const Matrix to(out, ScalarType::BFloat16, "out must be a bfloat16 matrix with contiguous rows");
  const Matrix table(tables, ScalarType::Long, "page tables must be an int64 matrix with contiguous rows");
  const Heads queries(q, "q must be bfloat16 heads"), new_keys(k, "k must be bfloat16 heads");
  const Heads new_values(v, "v must be bfloat16 heads");
  const int64_t count = queries.rows, heads = queries.heads, size = queries.size, kv_heads = new_keys.heads;
  require(k_pages.dim() == 4 && k_pages.size(2) == kv_heads && k_pages.size(3) == size, "k doesn't fit its pages");
  const int64_t pages = k_pages.size(0), page_size = k_pages.size(1), width = kv_heads * size;
  auto* keys = (uint16_t*)dense(k_pages, ScalarType::BFloat16, pages * page_size * width, "pages of keys");
  auto* values = (uint16_t*)dense(v_pages, ScalarType::BFloat16, pages * page_size * width, "pages of values");
  const auto* entries = (const int64_t*)dense(rows, ScalarType::Long, count, "rows don't fit q");
  const auto* places = (const int64_t*)dense(positions, ScalarType::Long, count, "positions don't fit q");
  require(size % LANES == 0 && kv_heads > 0 && heads % kv_heads == 0 && to.rows == count &&
              to.columns == heads * size && new_keys.rows == count && new_values.rows == count &&
              new_values.heads == kv_heads && new_values.size == size && new_keys.size == size && window >= 0,
          "sizes of out, q, k and v don't fit each other");
  const auto place_of = [&](int64_t row, int64_t position) {
    const int64_t* entry = reinterpret_cast<const int64_t*>(table.data) + entries[row] * table.stride;
    return (entry[position / page_size] * page_size + position % page_size) * width;
  };
  struct Task {
    int64_t row, head, first, last;  // tokens first..last - 1
  };
  static thread_local std::vector<Task> tasks;
  static thread_local std::vector<int64_t> first_part;  // of a row
  tasks.clear(), first_part.clear();
  int64_t tokens = 0, parts = 0;
  for (int64_t i = 0; i < count; i++) {
    require(entries[i] >= 0 && entries[i] < table.rows, "a row without a page table");
    require(places[i] >= 0 && places[i] < table.columns * page_size, "a position beyond its page table");
    const int64_t* entry = reinterpret_cast<const int64_t*>(table.data) + entries[i] * table.stride;
    const int64_t end = places[i] + 1, first = window ? std::max<int64_t>(0, end - window) : 0;
    for (int64_t page = first / page_size; page <= places[i] / page_size; page++)
      require(entry[page] >= 0 && entry[page] < pages, "a page that doesn't exist");
    tokens += end - first;
    first_part.push_back(parts);
    for (int64_t token = first; token < end; token += SPAN, parts++)
      for (int64_t head = 0; head < kv_heads; head++) tasks.push_back({i, head, token, std::min(end, token + SPAN)});
  }
  first_part.push_back(parts);
  for (int64_t i = 0; i < count; i++) {
    std::memcpy(keys + place_of(i, places[i]), new_keys.data + i * new_keys.stride, 2 * width);
    std::memcpy(values + place_of(i, places[i]), new_values.data + i * new_values.stride, 2 * width);
  }
  // A part has a span's result for each head of a row.
  const int64_t stride = size + sizeof(Part) / sizeof(float), group = heads / kv_heads;
  static thread_local std::vector<float> kept;
  kept.resize(parts * heads * stride);
  const Task* all = tasks.data();
  float* found = kept.data();
  const int64_t per_task = 2 * tokens * heads * size / std::max<int64_t>(1, tasks.size()) + 1;
  torch::stable::parallel_for(0, tasks.size(), std::max<int64_t>(1, GRAIN / per_task), [&](int64_t begin, int64_t end) {
    thread_local std::vector<int64_t> offsets;
    thread_local std::vector<float> scratch;
    for (const Task* task = all + begin; task < all + end; task++) {
      const int64_t i = task->row, head = task->head;
      offsets.clear();
      for (int64_t t = task->first; t < task->last; t++) offsets.push_back(place_of(i, t) + head * size);
      const int64_t part = (task - all) / kv_heads;
      for (int64_t first = head * group; first < (head + 1) * group;) {
        const uint16_t* from = queries.data + i * queries.stride + first * size;
        float* target = found + (part * heads + first) * stride;
        const auto some = [&](auto number) {
          attend<number()>(from, keys, values, offsets, size, float(scale), scratch, target, stride);
          first += number();
        };
        const int64_t left = (head + 1) * group - first;
        if (left >= 4) some(std::integral_constant<int, 4>{});
        else if (left == 3) some(std::integral_constant<int, 3>{});
        else if (left == 2) some(std::integral_constant<int, 2>{});
        else some(std::integral_constant<int, 1>{});
      }
    }
  });
  const int64_t* starts = first_part.data();
  torch::stable::parallel_for(0, count, std::max<int64_t>(1, GRAIN / (heads * size)), [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> sums;
    for (int64_t i = begin; i < end; i++) {
      uint16_t* target = reinterpret_cast<uint16_t*>(to.data) + i * to.stride;
      for (int64_t head = 0; head < heads; head++)
        merge(found + (starts[i] * heads + head) * stride, starts[i + 1] - starts[i], heads * stride, size, sums,
              target + head * size);
    }
  });
}

// Call row(i) for each of `rows` rows of `numbers` numbers. Threads share the rows.
template <class Row>
void for_each_row(int64_t rows, int64_t numbers, const Row& row) {
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, numbers));
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) row(i);
  });
}

// The sum of squares of `size` numbers.
inline float square_sum(const uint16_t* x, int64_t size) {
  Floats sums;
  int64_t i = 0;
  for (; size - i >= LANES; i += LANES) {
    const Floats some = Floats::from_bfloat16(x + i);
    sums.add_product(some, some);
  }
  float sum = total(sums);
  for (; i < size; i++) sum += to_float(x[i]) * to_float(x[i]);
  return sum;
}

// out [T, P, N] bfloat16 = x [T, P, N] bfloat16 over its root mean square, rounded, times weight [P, N] bfloat16. With
// `offset` the factor is 1 + weight, and only the product is rounded.
void rms_norm(Tensor out, Tensor x, Tensor weight, double eps, bool offset) {
  const Heads from(x, "x must be bfloat16 rows");
  const int64_t size = from.size, heads = from.heads;
  auto* to = (uint16_t*)dense(out, ScalarType::BFloat16, from.rows * heads * size, "out doesn't fit x");
  const auto* weights = (const uint16_t*)dense(weight, ScalarType::BFloat16, heads * size, "weight doesn't fit x");
  for_each_row(from.rows, heads * size, [&](int64_t t) {
    for (int64_t head = 0; head < heads; head++) {
      const uint16_t *row = from.data + t * from.stride + head * size, *factors = weights + head * size;
      uint16_t* target = to + (t * heads + head) * size;
      const float scale = 1 / std::sqrt(square_sum(row, size) / size + float(eps));
      if (offset)
        for (int64_t i = 0; i < size; i++)
          target[i] = to_bfloat16(to_float(row[i]) * scale * (1 + to_float(factors[i])));
      else
        for (int64_t i = 0; i < size; i++)
          target[i] = to_bfloat16(to_float(to_bfloat16(to_float(row[i]) * scale)) * to_float(factors[i]));
    }
  });
}

// One element of a rotated pair, whose sine has its sign: rounded after each of two steps, as PyTorch does.
inline uint16_t rotated(uint16_t x, uint16_t other, uint16_t cos, uint16_t sin) {
  const float kept = to_float(to_bfloat16(to_float(x) * to_float(cos)));
  return to_bfloat16(kept + to_float(other) * to_float(sin));
}

// out [T, heads, D] bfloat16 = x rotated by cos and sin [T, dims] bfloat16; elements from `dims` on are copied. Pairs are
// i and i + dims / 2, or neighbours if `interleaved`.
void rotate(Tensor out, Tensor x, Tensor cos, Tensor sin, bool interleaved) {
  const Heads from(x, "x must be bfloat16 heads");
  const Matrix cosines(cos, ScalarType::BFloat16, "cos must be a bfloat16 matrix with contiguous rows");
  const Matrix sines(sin, ScalarType::BFloat16, "sin must be a bfloat16 matrix with contiguous rows");
  const int64_t size = from.size, heads = from.heads, dims = cosines.columns;
  auto* to = (uint16_t*)dense(out, ScalarType::BFloat16, from.rows * heads * size, "out doesn't fit x");
  require(dims % 2 == 0 && dims <= size && sines.columns == dims && cosines.rows == from.rows &&
              sines.rows == from.rows, "cos and sin don't fit x");
  for_each_row(from.rows, heads * size, [&](int64_t t) {
    const uint16_t* c = reinterpret_cast<const uint16_t*>(cosines.data) + t * cosines.stride;
    const uint16_t* s = reinterpret_cast<const uint16_t*>(sines.data) + t * sines.stride;
    for (int64_t head = 0; head < heads; head++) {
      const uint16_t* row = from.data + t * from.stride + head * size;
      uint16_t* target = to + (t * heads + head) * size;
      const int64_t half = dims / 2;
      if (interleaved)
        for (int64_t i = 0; i < dims; i++) target[i] = rotated(row[i], row[i ^ 1], c[i], s[i]);
      else {
        for (int64_t i = 0; i < half; i++) target[i] = rotated(row[i], row[i + half], c[i], s[i]);
        for (int64_t i = half; i < dims; i++) target[i] = rotated(row[i], row[i - half], c[i], s[i]);
      }
      std::copy(row + dims, row + size, target + dims);
    }
  });
}

// out [T, N] bfloat16 = silu(gate), rounded, times up, both [T, N] bfloat16. silu(x) = x / (1 + e^-x).
void silu_mul(Tensor out, Tensor gate, Tensor up) {
  const Matrix gates(gate, ScalarType::BFloat16, "gate must be a bfloat16 matrix with contiguous rows");
  const Matrix ups(up, ScalarType::BFloat16, "up must be a bfloat16 matrix with contiguous rows");
  const int64_t size = gates.columns;
  require(ups.rows == gates.rows && ups.columns == size, "gate and up don't fit each other");
  auto* to = (uint16_t*)dense(out, ScalarType::BFloat16, gates.rows * size, "out doesn't fit gate");
  for_each_row(gates.rows, 4 * size, [&](int64_t t) {
    const uint16_t* row = reinterpret_cast<const uint16_t*>(gates.data) + t * gates.stride;
    const uint16_t* factors = reinterpret_cast<const uint16_t*>(ups.data) + t * ups.stride;
    uint16_t* target = to + t * size;
    for (int64_t i = 0; i < size; i++) {
      const float x = to_float(row[i]), power = exponential(-std::fabs(x));
      const float silu = x * (x < 0 ? power : 1.0f) / (1 + power);
      target[i] = to_bfloat16(to_float(to_bfloat16(silu)) * to_float(factors[i]));
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY(encore_cpu, m) {
  m.def("int4_linear(Tensor(a!) out, Tensor x, Tensor packed, Tensor scales, Tensor? bias) -> ()");
  m.def("int8_linear(Tensor(a!) out, Tensor x, Tensor codes, Tensor scales) -> ()");
  m.def("int8_rows(Tensor(a!) out, Tensor ids, Tensor codes, Tensor scales) -> ()");
  m.def(
      "paged_decode(Tensor(a!) out, Tensor(b!) k_pages, Tensor(c!) v_pages, Tensor q, Tensor k, Tensor v, "
      "Tensor tables, Tensor rows, Tensor positions, float scale, int window) -> ()");
  m.def("dense_linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()");
  m.def("rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps, bool offset) -> ()");
  m.def("rotate(Tensor(a!) out, Tensor x, Tensor cos, Tensor sin, bool interleaved) -> ()");
  m.def("silu_mul(Tensor(a!) out, Tensor gate, Tensor up) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(encore_cpu, CPU, m) {
  m.impl("int4_linear", TORCH_BOX(&int4_linear));
  m.impl("int8_linear", TORCH_BOX(&int8_linear));
  m.impl("int8_rows", TORCH_BOX(&int8_rows));
  m.impl("paged_decode", TORCH_BOX(&paged_decode));
  m.impl("dense_linear", TORCH_BOX(&dense_linear));
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rotate", TORCH_BOX(&rotate));
  m.impl("silu_mul", TORCH_BOX(&silu_mul));
}
