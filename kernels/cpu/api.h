// The C face of the library: plain structs and pointers, filled by the Python files beside this one through ctypes.
// Everything is row-major. Sizes are in elements, never in bytes, unless a name says so.
#pragma once

#include <cstdint>

enum Dtype : int32_t { F32 = 0, BF16 = 1, F16 = 2, INT8 = 3 };
enum Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU_ERF = 2, RELU = 3, RELU2 = 4 };
enum Status : int32_t { OK = 0, NO_MEMORY = 1, BAD_TOKEN = 2, UNSUPPORTED = 3 };

// Columns of a packed matrix lie in panels of 32: [panels][K][32], and for bf16 in pairs along K,
// [panels][ceil(K / 2)][32][2]. Column c is in panel (c / 32) * panel_stride + panel_offset: with a stride of 2 the
// panels of gate and up lie side by side. Columns that do not exist are zero.
struct Linear {
  const void* packed;  // nullptr: there is no such layer
  const float* bias;   // nullptr, or one for each column
  int64_t columns, depth;  // N and K
  int64_t first_column;
  int32_t panel_stride, panel_offset;
};

struct Norm {
  const float* weight;  // nullptr: there is no such layer; what is multiplied with, so 1 + w for Gemma
  const float* bias;    // nullptr, or what is added
  float eps;
  int32_t centred;  // LayerNorm, which takes the mean away; RMSNorm does not
};

// A step's view of one KV group: T tokens of R requests laid end to end.
struct Attention {
  const void *q, *k, *v;  // [T, heads, dim], with strides between tokens and between heads
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  void* out;  // [T, Hq, Dv], heads side by side
  int64_t out_token;
  void *k_cache, *v_cache;      // see attention.h
  float *k_scales, *v_scales;   // [Hkv, blocks, block_size] with an int8 cache
  const float* sinks;           // [Hq] or nullptr
  const int64_t* slots;         // [T]: block * block_size + offset; negative: not stored
  const int32_t* block_table;   // [R, max_blocks]
  const int32_t *cu_seqlens;    // [R + 1]
  const int32_t *seq_lens;      // [R]: keys, with this step's
  int64_t num_requests, max_blocks, num_blocks;
  int32_t num_heads, num_kv_heads, dim, v_dim, block_size;
  int32_t window, chunk;  // 0: none
  float scale, softcap;   // 0: none
  int32_t dtype, kv_dtype;
};

// One decoder layer. x += m * post_attention(o(attention(input(x)))), then x += m * post_mlp(mlp(pre_mlp(x))).
// `parallel`: the MLP sees the x from before attention, and both are added.
struct Layer {
  Norm input_norm, post_attention_norm, pre_mlp_norm, post_mlp_norm, q_norm, k_norm;
  Linear qkv, o, gate_up, down;
  Attention attention;       // q, k, v, out and the step's tables are filled in by the step
  const float *cos, *sin;    // [positions, rotary_dim] or nullptr
  int32_t rotary_dim, rotary_interleaved;
  int32_t norm_whole;        // q and k norms over all heads together
  int32_t activation, gated, parallel;
  int32_t group;             // which of the step's tables
  float residual_multiplier;
};

struct Model {
  const Layer* layers;
  int64_t num_layers, hidden, vocab, num_groups;
  const void* embedding;     // [vocab, hidden] or nullptr: then the rows come out of the head's panels
  Norm final_norm;
  Linear head;
  float embedding_multiplier, logits_multiplier, logits_softcap;
  int32_t dtype;
};

struct Step {
  const int64_t *ids, *positions;  // [T]
  const int64_t* rows;             // [S]: whose logits are wanted
  const int32_t *cu_seqlens, *seq_lens;
  const int64_t* const* slots;           // one for each group
  const int32_t* const* block_tables;
  const int64_t* max_blocks;
  int64_t num_tokens, num_rows, num_requests;
  const void* hidden_in;   // [T, hidden]: what the first layer gets, in place of the embedding; or nullptr
  void* hidden_out;        // [T, hidden]: what the last layer gives, in place of final norm and head; or nullptr
  float* logits;   // [S, vocab], or nullptr
  int64_t* best;   // [S] where logits is nullptr: the largest one's index, -1 if one is NaN
};

// One row of logits to draw from, and what was drawn. The lists of tokens are applied before all else, in this order;
// tokens outside the vocabulary are passed over, and in `repeated` and `added` each stands once at most.
struct Draw {
  int64_t row;
  double uniform;       // in [0, 1)
  double top_p, min_p;  // 1 and 0: none
  int64_t top_k;        // 0: none
  float temperature;
  int32_t greedy, logprobs;  // greedy: the first of the largest, and a logprob only where it is asked for
  int64_t token;             // or one of the two below
  double logprob;            // among the tokens that the filters leave
  int64_t kept;              // how many these are; greedy ones leave it alone
  const int32_t* repeated;  // whose scores are divided by the penalty, or multiplied where they are negative
  const int32_t* banned;    // whose scores become -infinity
  const int32_t* added;     // to whose scores an amount is added
  const float* amounts;
  int64_t num_repeated, num_banned, num_added;
  float repetition;
};
enum NoToken : int64_t { NOT_A_NUMBER = -1, NO_TOKEN = -2 };  // NO_TOKEN: none has a probability above zero

struct Workspace;

// What one variant of the library offers.
struct Table {
  const char* name;
  void (*pack)(int32_t dtype, const void* weight, int64_t rows, int64_t depth, int64_t first_column,
               int32_t panel_stride, int32_t panel_offset, void* packed, int32_t unpack, int32_t threads);
  int32_t (*linear)(Workspace*, int32_t dtype, const void* x, int64_t x_row, int64_t rows, const Linear*, void* out,
                    int64_t out_row, int32_t threads);
  void (*embed)(int32_t dtype, const Linear*, const int64_t* ids, int64_t count, void* out, int32_t threads);
  int32_t (*attend)(Workspace*, const Attention*, int32_t threads);
  int32_t (*step)(Workspace*, const Model*, const Step*, int32_t threads);
  int32_t (*sample)(Workspace*, float* logits, int64_t row_stride, int64_t vocab, Draw*, int64_t count,
                    int32_t threads);
};
