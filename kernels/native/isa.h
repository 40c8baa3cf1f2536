// The table of inner loops that one instruction set provides, and the choice between the sets at run time.
// Everything above this table is instruction-set neutral.
//
// A panel is 64 output columns of packed weights: blocks of 32 inputs, each of 4 tiles of 16 columns, each
// tile 512 elements. In a bf16 tile element (k, column) sits at (k / 2) * 32 + column * 2 + k % 2,
// in a float tile at k * 16 + column; weights of fewer bits are in int8.h and int4.h. Sums are float rows of 64 columns.
#pragma once
#include "eight.h"
#include "codes.h"
#include "element.h"
#include "ggml.h"
#include "int8.h"

constexpr int PANEL = 64;        // columns of a panel
constexpr int BLOCK = 32;        // inputs of a block
constexpr int TILE = 512;        // elements of a tile
constexpr int ROW_GROUP = 16;    // rows of a product are read and written in whole groups
constexpr int PANEL_BLOCK = 4 * TILE;  // elements of one block of a panel
constexpr int MOST_EXPANDED = 16;      // blocks, 64 KiB of bf16

// Cache lines that a product may ask for while it runs, because what follows it will read them. A hint.
struct Next {
  const char* data = nullptr;
  int lines = 0;
};

// A compact weight whose high byte is none of its panel's sixteen; `place` counts the panel's elements.
struct Patch {
  uint32_t place;
  bf16 value;
};

// A panel of int4 weights (int4.h): groups of `group` blocks, the last one may be shorter. A group is 64 scales, float if
// `wide`, else bf16, and then 1,024 bytes for each of its blocks.
struct Int4Panel {
  const char* data;
  int blocks, group;
  bool wide, e2m1;
};

// The scores of a window of keys on their way to weights, which are e^(scale * (score - top)). Top is no less than the
// row's highest score less `slack`, so the sums so far are scaled only when a score exceeds that; weights above 1 are as
// precise as those below.
template <class E>
struct TilesSoftmax {
  const float* score;  // as score_tiles leaves them
  size_t row, step;
  int from, keys;      // keys from .. keys - 1 of these, in sixteens
  int rise;            // so many of the first may raise the top
  float scale, slack;
  const int *low, *high;  // of each row: keys low .. high - 1 are seen; null: all by all
  float *top, *total;     // so far: one, and 16 that are to be added, of each row
  E* weight;              // weight[r * window + key]
  int window;
  float* sum;             // so far: 64 of each row, `sum_step` to the next panel
  size_t sum_step;
  int panels;
};

// How an FFN joins gate and up: silu(gate) * up; if clamped, gate * sigmoid(alpha * gate) * (up + 1), where the gate is at
// most `limit` and up is within it on both sides (gpt-oss), or, if bounded too, silu(gate) * up within the same limits. If
// squared there is no gate: relu(up)^2. GELU by tanh may stand in the place of an unclamped SiLU.
struct Gating {
  bool clamped = false;
  float limit = 0, alpha = 1;
  bool bounded = false, squared = false, gelu = false;
};

template <class E>
struct Loops {
  // sum[rows][64] (+)= a[rows][32 * blocks] * panel. May read and write rows up to the next multiple of ROW_GROUP.
  void (*gemm)(const E* a, size_t stride, int rows, const E* panel, int blocks, float* sum, bool add, Next next);
  // sum[rows][64] = a * panel, for so many blocks of 32 inputs: weights are widened.
  void (*gemm_i8)(const E* a, size_t stride, int rows, const Int8Panel& panel, int blocks, float* sum);
  // sum[rows][64] = a * panel: a product for each group, times its scales, added in float in ascending order.
  void (*gemm_i4)(const E* a, size_t stride, int rows, const Int4Panel& panel, float* sum);
  // sum[rows][64] = a * panel: weights are widened to floats.
  void (*gemm_ggml)(const E* a, size_t stride, int rows, const GgmlPanel& panel, float* sum);
  // out[rows][columns] = sum (+ bias64 when given)
  void (*store)(const float* sum, int rows, const float* bias, E* out, size_t stride, int columns);
  // Panel of gate tile, up tile, gate tile, up tile -> out[rows][32] = silu(gate) * up.
  void (*swiglu)(const float* sum, int rows, E* out, size_t stride);
  void (*geglu)(const float* sum, int rows, E* out, size_t stride);  // the same with gelu(gate)
  void (*clamped_swiglu)(const float* sum, int rows, const Gating& gating, E* out, size_t stride);
  void (*squared_relu)(const float* sum, int rows, E* out, size_t stride);  // out[rows][64], of a panel without gates
  void (*gated)(const E* gate, const E* up, int size, E* out);  // silu(gate) * up
  void (*rms_norm)(const E* x, const E* weight, float eps, int size, E* out);
  bool (*add)(E* x, const E* y, int size);  // x += y, rounded to E; whether all of x is finite now
  bool (*add_sums)(E* x, const float* y, int size);
  // Pairs (i, i + half), or (2 i, 2 i + 1) if interleaved; out always split in halves.
  void (*rope)(const E* x, const float* cos, const float* sin, int half, bool interleaved, E* out);
  // `count` keys of `size` elements, in sixteens, as the panel of a product with up to 64 outputs.
  void (*pack_keys)(const E* const* rows, int count, int size, int blocks, E* panel);
  // scores[16][64] of 64 keys, whose sixteens begin at keys[0 .. 3] and lie `stride` elements apart, for 16 queries
  // that pack_keys packed; at least the first `rows` are written. Null where it would be no faster. Between enter and leave only.
  void (*score)(const E* queries, const E* const* keys, size_t stride, int blocks, int rows, float* scores);
  // Whether the products below read tiles where they lie, rather than make panels of them.
  bool in_place;
  // Scores of keys in up to 8 tiles of keys (tiles.h) of `lines` words, which rows of queries are as long as; next[0 ..
  // tiles - 1] will be read later, all null for nothing to ask for. Key k of row r is score[k / 64 * step + r * row + k % 64].
  // Queries and rows as gemm's; where products are in place, up to `word_rows` rows, or rows of
  // scores that are no 64, have their words of 4 bytes in turn, `stride` elements each.
  void (*score_tiles)(const E* queries, size_t stride, int rows, const E* const* tile, const E* const* next, int tiles,
                      int lines, float* score, size_t row, size_t step);
  // sum[rows][64] += weights[rows][16 * tiles] * columns first .. first + 63 of so many tiles of values, `size` columns
  // each; past the last, any. `next` as above. Rows as gemm's.
  void (*add_values)(const E* weights, size_t stride, int rows, const E* const* tile, const E* const* next, int tiles,
                     int first, int size, float* sum);
  // Scores of keys 0 .. keys - 1 of one row become weights, unless its top would rise again past those that may raise it:
  // false then, and nothing is done.
  bool (*softmax_at_once)(const TilesSoftmax<E>&, int row);
  // Scores become weights in rows first .. first + rows - 1.
  void (*softmax_tiles)(const TilesSoftmax<E>& scores, int first, int rows);
  // Columns first .. first + 63 of 64 value rows as a panel with 64 inputs.
  void (*pack_values)(const E* const* rows, int first, int columns, E* panel);
  // Codes of 8 bits (eight.h), times a scale, as `count` numbers.
  void (*widen_row)(const void* codes, int count, Bits bits, float scale, E* out);
  // The scales of sixteen keys and of their values, which lie behind rows so far apart; 0 but for rows first .. end - 1.
  void (*take_scales)(const void* scales, size_t stride, int first, int end, float* keys, float* values);
  void (*scale_each)(E* x, const float* scale, int count);  // x[i] *= scale[i]; counts are multiples of 16
  // Sixteen rows of `size` codes, `stride` bytes apart, as a tile of keys or values (tiles.h) of the codes' own numbers.
  void (*widen_keys)(const void* rows, size_t stride, int size, Bits bits, E* tile);
  void (*widen_values)(const void* rows, size_t stride, int size, Bits bits, E* tile);
  // One row of 64 scores: the softmax so far (top, total), and this chunk's weights. [low, high) may be seen.
  // Returns what the earlier sums must be scaled by.
  float (*softmax)(const float* score, float scale, int low, int high, float* top, float* total, E* weight);
  float (*dot)(const E* x, const E* y, int size);
};

struct Isa {
  const char* name;
  Loops<bf16> b;
  Loops<float> f;
  void (*add_scaled)(float* out, const float* base, const float* row, float weight, int size);  // base + weight * row
  void (*add_rounded)(float* out, const float* base, const float* row, float weight, int size);  // the same, rounded
  void (*scale_row)(float* row, float factor, int size);
  // out = scale * the sum of `count` rows, `step` floats apart, each times its factor, `factor_step` apart; in this order, and
  // nothing of a row whose factor is 0.
  void (*sum_scaled)(float* out, const float* rows, size_t step, int count, const float* factor, size_t factor_step,
                     float scale, int size);
  // score[64] = the sum over `heads` rows of 64 sums, in this order, of weight * relu(sum); what is no number stays none.
  void (*sum_heads)(const float* sums, const float* weight, int heads, float* score);
  float (*exp_all)(float* x, float top, int size);  // x = e^(x - top), returns the sum
  bool (*all_finite)(const float* x, int size);
  int (*argmax)(const float* x, int size);  // the first of the highest; -1 where any is not finite
  void (*sigmoid_all)(float* x, int size);
  void (*silu_all)(float* x, int size);
  void (*softplus_all)(float* x, int size);  // log(1 + e^x)
  void (*add_product)(float* out, const float* a, const float* b, int size);  // out += a * b
  void (*unit)(float* x, int size, float length);                            // x becomes a vector of that length
  // The gated delta rule (delta.h) for 64 columns of a state of so many rows: v is what k should say. The state keeps a part
  // of itself, a share of the difference is added along k, and q reads it into out.
  void (*delta_token)(float* state, int rows, const float* q, const float* k, const float* v, float keep, float share,
                      float* out);
  // The same where each row keeps a part of its own; and where a share of v itself is added along k.
  void (*delta_channels)(float* state, int rows, const float* q, const float* k, const float* v, const float* keep,
                         float share, float* out);
  void (*delta_sum)(float* state, int rows, const float* q, const float* k, const float* v, float keep, float share,
                    float* out);
  void (*enter)();  // before a thread's first product of an op: sets up wide registers
  void (*leave)();  // after its last: gives them back
  // Units of compact weights (compact.h), to and fro; null where expansion would be slower than reading whole weights.
  // Bit i of missing[j] says that the high byte of weight 64 j + i is none of the 16.
  void (*compact)(const bf16* panel, int units, const uint8_t* high, uint8_t* out, uint64_t* missing);
  // `ahead`: as many units that will be needed next, or null.
  void (*expand)(const uint8_t* units, int count, const uint8_t* high, bf16* out, const char* ahead);

  // sum[rows][64] = a * panel of compact units, widened in registers, with gemm's bits. False, and nothing done, for more rows
  // than pay; null where it never does. `patch` to `end` ascend; `after` is the panel that will most likely be read next.
  bool (*compact_few_rows)(const bf16* a, size_t stride, int rows, const uint8_t* units, const uint8_t* high, int blocks,
                           const Patch* patch, const Patch* end, float* sum, const char* after);
  // So many lines of 64 FP8 codes (fp8.h) as the numbers that they are.
  void (*widen_fp8)(const char* codes, int lines, bf16* out);
  // product[rows][64] = a times a group of such codes, up to 4 blocks, with the bits of gemm; false, and nothing done, for more
  // rows than pay, and null where it never does.
  bool (*fp8_few_rows)(const bf16* a, size_t stride, int rows, const char* codes, int blocks, float* product);
  // Row `row` of `to` (int8.h) as `gemm_bytes` reads it: `size` numbers, and zeros up to the stride. A row that is not
  // finite gets NaN as its scale.
  void (*to_bytes)(const bf16* x, int size, const ByteRows& to, int row);
  // sum[rows][64] = a * panel: sums of whole numbers, which are exact, then the scales. Both null where widening is faster.
  void (*gemm_bytes)(const ByteRows& a, int rows, const Int8Panel& panel, float* sum, Next next);
  // gemm_i4 with its bits where there is a faster way; false, and nothing done, where there is none.
  bool (*int4_fast)(const bf16* a, size_t stride, int rows, const Int4Panel& panel, float* sum, const char* after);
  // The same two as `to_bytes` and `gemm_bytes`, for int4 weights.
  void (*to_words)(const bf16* x, int size, const ByteRows& to, int row);
  void (*gemm_words)(const ByteRows& a, int rows, const Int4Panel& panel, float* sum, Next next);
  // The same two for ggml's types: behind a row's numbers are the sums of each GGML_SUMS of them.
  void (*to_ggml)(const bf16* x, int size, const ByteRows& to, int row);
  void (*gemm_ggml)(const ByteRows& a, int rows, const GgmlPanel& panel, float* sum, Next next);
  // Products with codes of int8 where they lie (codes.h), all null where making tiles of them is faster.
  // A row of queries as whole numbers; its scores of each tile's sixteen tokens, whose scales are given for the first tile,
  // score[r * row + token], `step` to those of the next 64 tokens; and sum[rows][64], `panel_step` to the next 64 columns, += weights[rows][16 * tiles],
  // which may be written, times the tokens' scales and values of `size` columns.
  void (*to_codes)(const bf16* q, int size, int row, const CodeQueries& to);
  void (*score_codes)(const CodeQueries& q, const uint8_t* const* code, int tiles, size_t stride, int size, const CodeScales& scale,
                      float* score, size_t row, size_t step);
  void (*add_codes)(bf16* weights, size_t stride, int rows, const uint8_t* const* code, int tiles, size_t code_stride, int size,
                    const float* scale, float* sum, size_t panel_step);
  // Where products with tiles are in place: up to so many rows of queries lie word by word, and more as gemm's.
  int word_rows;
  int code_block = 16;  // sizes of keys' parts and of values that the two take are multiples of it
  // Blocks of a compact panel (compact.h) that are expanded at a time for more than 32 rows, at most MOST_EXPANDED: few
  // stay in the nearest cache; with many, sums leave registers seldom.
  int expand_blocks = 4;

  template <class E>
  const Loops<E>& of() const;
};

template <>
inline const Loops<bf16>& Isa::of<bf16>() const {
  return b;
}
template <>
inline const Loops<float>& Isa::of<float>() const {
  return f;
}

// The set called `name`, or the best one if empty. Null if this machine cannot run it.
const Isa* find_isa(const char* name);
