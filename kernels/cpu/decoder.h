// One step of a whole decoder: embedding, every layer, final norm, head, and the best token of each wanted row.
// All threads walk through it together inside one parallel region, phase by phase (meeting.h). Between
// layers the stream x is kept in float; everything that is multiplied is in the model's own type.
#pragma once

#include "head.h"
#include "linear.h"
#include "store.h"

namespace {

template <class T>
struct Decoder {
  Workspace& ws;
  const Model& model;
  const Step& step;
  int threads;
  Cut cuts[Workspace::MOST_CUTS];
  int num_cuts = 0;
  int64_t widest_qkv = 0, widest_attended = 0, widest_mlp = 0;

  // Buffers, row by row: the stream, what a norm gives, what it gives a parallel MLP, and so on.
  float *x, *y, *scratch;
  T *normed, *normed_too, *qkv, *attended, *active;
  void* rows;
  Best* best;

  Decoder(Workspace& ws, const Model& model, const Step& step, int threads)
      : ws(ws), model(model), step(step), threads(threads) {}

  int32_t run() {
    for (int64_t t = 0; t < step.num_tokens && !step.hidden_in; t++)
      if (step.ids[t] < 0 || step.ids[t] >= model.vocab) return BAD_TOKEN;
    const int32_t status = prepare();
    if (status != OK) return status;
    in_parallel(threads, [this](Team& team) { walk(team); });
    return OK;
  }

 private:
  Attention attention_of(const Layer& layer) const {
    Attention a = layer.attention;
    const int64_t wide = layer.qkv.columns;
    a.q = qkv, a.q_token = wide, a.q_head = a.dim;
    a.k = qkv + a.num_heads * a.dim, a.k_token = wide, a.k_head = a.dim;
    a.v = qkv + (a.num_heads + a.num_kv_heads) * a.dim, a.v_token = wide, a.v_head = a.v_dim;
    a.out = attended, a.out_token = (int64_t)a.num_heads * a.v_dim;
    a.slots = step.slots[layer.group], a.block_table = step.block_tables[layer.group];
    a.max_blocks = step.max_blocks[layer.group], a.num_requests = step.num_requests;
    a.cu_seqlens = step.cu_seqlens, a.seq_lens = step.seq_lens;
    return a;
  }

  static bool alike(const Attention& a, const Attention& b) {
    return a.num_heads == b.num_heads && a.num_kv_heads == b.num_kv_heads && a.v_dim == b.v_dim &&
           a.window == b.window && a.chunk == b.chunk;
  }

  int cut_of(int64_t layer) const {
    const Attention& a = model.layers[layer].attention;
    for (int i = 0; i < num_cuts; i++)
      if (alike(model.layers[ws.cut_layers[i]].attention, a)) return i;
    return -1;
  }

  int32_t prepare() {
    size_t row_bytes = 0, floats = 0, partials = 0;
    const int64_t T_ = step.num_tokens, H = model.hidden;
    row_bytes = most(rows_bytes<T>(T_, H), rows_bytes<T>(step.num_rows, H));
    for (int64_t i = 0; i < model.num_layers; i++) {
      const Layer& layer = model.layers[i];
      const Attention& a = layer.attention;
      if (a.dim > MOST_DIM || a.v_dim > MOST_DIM) return UNSUPPORTED;
      widest_qkv = most(widest_qkv, layer.qkv.columns);
      widest_attended = most(widest_attended, (int64_t)a.num_heads * a.v_dim);
      widest_mlp = most(widest_mlp, layer.down.depth);
      floats = most(floats, Attend<T, T>::scratch_floats(a));
      if (cut_of(i) >= 0) continue;
      if (num_cuts == Workspace::MOST_CUTS) return UNSUPPORTED;
      ws.cut_layers[num_cuts] = i;
      Buffer &items = ws.cut_items[num_cuts], &order = ws.cut_orders[num_cuts];
      if (cut_items(items, order, attention_of(layer), threads, cuts[num_cuts]) != OK) return NO_MEMORY;
      partials = most(partials, cuts[num_cuts++].partial_floats);
    }
    row_bytes = most(row_bytes, most(rows_bytes<T>(T_, widest_attended), rows_bytes<T>(T_, widest_mlp)));
    const auto need = [&](int buffer, size_t bytes) { return ws.buffers[buffer].need(bytes + 1); };
    x = (float*)need(Workspace::STREAM, T_ * H * sizeof(float));
    y = (float*)need(Workspace::SECOND, T_ * H * sizeof(float));
    normed = (T*)need(Workspace::NORMED, most(T_, step.num_rows) * H * sizeof(T));
    normed_too = (T*)need(Workspace::NORMED_TOO, T_ * H * sizeof(T));
    qkv = (T*)need(Workspace::QKV, T_ * widest_qkv * sizeof(T));
    attended = (T*)need(Workspace::ATTENDED, T_ * widest_attended * sizeof(T));
    active = (T*)need(Workspace::ACTIVE, T_ * widest_mlp * sizeof(T));
    rows = need(Workspace::ROWS, row_bytes);
    scratch = (float*)need(Workspace::SCRATCH, threads * floats * sizeof(float));
    best = (Best*)need(Workspace::BEST, threads * step.num_rows * sizeof(Best));
    const bool all = x && y && normed && normed_too && qkv && attended && active && rows && scratch && best;
    return all && need(Workspace::PARTIALS, partials * sizeof(float)) ? OK : NO_MEMORY;
  }

  void walk(Team& team) {
    each_row(team, [this](int64_t t) { embed(t); });
    const Layer* before = nullptr;  // where it ends with a norm, which then opens the next phase
    for (int64_t i = 0; i < model.num_layers; i++) {
      const Layer& layer = model.layers[i];
      each_row(team, [&](int64_t t) {
        if (before) add_normed(before->post_mlp_norm, *before, t);
        norm_into(layer.input_norm, t, normed);
        if (layer.parallel && layer.pre_mlp_norm.weight) norm_into(layer.pre_mlp_norm, t, normed_too);
      });
      linear_in(prepare_rows(normed, model.hidden, step.num_tokens, model.hidden, rows, team), step.num_tokens,
                layer.qkv, qkv, layer.qkv.columns, team);
      const Attention a = attention_of(layer);
      if (a.kv_dtype == INT8) attend<int8_t>(layer, a, cut_of(i), team);
      else attend<T>(layer, a, cut_of(i), team);
      add_product(attended, widest(a), layer.o, layer, layer.post_attention_norm, team);
      if (layer.post_attention_norm.weight || !layer.parallel)
        each_row(team, [&](int64_t t) {
          if (layer.post_attention_norm.weight) add_normed(layer.post_attention_norm, layer, t);
          if (!layer.parallel) norm_into(layer.pre_mlp_norm, t, normed);
        });
      mlp(layer, team);
      add_product(active, layer.down.depth, layer.down, layer, layer.post_mlp_norm, team);
      before = layer.post_mlp_norm.weight ? &layer : nullptr;
    }
    if (before) each_row(team, [&](int64_t t) { add_normed(before->post_mlp_norm, *before, t); });
    if (step.hidden_out) each_row(team, [this](int64_t t) { leave(t); });
    else head(team);
  }

  static int64_t widest(const Attention& a) { return (int64_t)a.num_heads * a.v_dim; }

  template <class F>
  void each_row(Team& team, F work) {
    team.stretches(step.num_tokens, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) work(t);
    });
  }

  void embed(int64_t t) {
    const int64_t H = model.hidden;
    if (step.hidden_in) {
      for (int64_t k = 0; k < H; k++) x[t * H + k] = to_float(((const T*)step.hidden_in)[t * H + k]);
      return;
    }
    const T* row = (const T*)model.embedding + step.ids[t] * H;
    for (int64_t k = 0; k < H; k++) {
      const T value = model.embedding ? row[k]
                                      : *element((T*)model.head.packed, H, model.head.first_column + step.ids[t],
                                                 model.head.panel_stride, model.head.panel_offset, k);
      T rounded = value;
      if (model.embedding_multiplier != 1.f) put(&rounded, to_float(value) * model.embedding_multiplier);
      x[t * H + k] = to_float(rounded);
    }
  }

  void leave(int64_t t) {
    const int64_t H = model.hidden;
    for (int64_t k = 0; k < H; k++) put((T*)step.hidden_out + t * H + k, x[t * H + k]);
  }

  void norm_into(const Norm& norm, int64_t t, T* out) {
    const int64_t H = model.hidden;
    if (norm.weight) return norm_row(norm, x + t * H, H, out + t * H);
    for (int64_t k = 0; k < H; k += W) store_some(out + t * H + k, load_some(x + t * H + k, H - k), H - k);
  }

  // x += m * norm(y)
  void add_normed(const Norm& norm, const Layer& layer, int64_t t) {
    const int64_t H = model.hidden;
    norm_row(norm, y + t * H, H, y + t * H);
    for (int64_t k = 0; k < H; k++) x[t * H + k] += layer.residual_multiplier * y[t * H + k];
  }

  // Query and key norms, rotation, and into the cache: head by head.
  template <class C>
  void attend(const Layer& layer, const Attention& a, int cut, Team& team) {
    const int heads = a.num_heads + 2 * a.num_kv_heads;
    if (layer.norm_whole && layer.q_norm.weight) {
      const int64_t q = (int64_t)a.num_heads * a.dim, k = (int64_t)a.num_kv_heads * a.dim;
      each_row(team, [&](int64_t t) {
        T* row = qkv + t * layer.qkv.columns;
        norm_row(layer.q_norm, row, q, row);
        norm_row(layer.k_norm, row + q, k, row + q);
      });
    }
    const Layout<C> layout(a.dim, (int)v_row(a.v_dim), a.block_size);
    team.stretches(step.num_tokens, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++)
        for (int head = 0; head < heads; head++) place_head(layer, a, layout, t, head);
    });
    attend_items<T, C>(ws, a, cuts[cut], scratch, team);
  }

  template <class C>
  [[gnu::always_inline]] void place_head(const Layer& layer, const Attention& a, const Layout<C>& layout, int64_t t, int head) {
    const int kv = head - a.num_heads;
    T* row = qkv + t * layer.qkv.columns;
    alignas(64) float h[MOST_DIM + W];
    if (kv >= a.num_kv_heads) {  // a value
      if (a.slots[t] < 0) return;
      const T* v = row + (a.num_heads + a.num_kv_heads) * a.dim + (kv - a.num_kv_heads) * a.v_dim;
      for (int d = 0; d < a.v_dim; d += W) store_some(h + d, load_some(v + d, a.v_dim - d), a.v_dim - d);
      return store_value(a, layout, a.slots[t], kv - a.num_kv_heads, h);
    }
    T* part = row + head * a.dim;
    const Norm& norm = kv < 0 ? layer.q_norm : layer.k_norm;
    if (norm.weight && !layer.norm_whole) norm_row(norm, part, a.dim, h);
    else
      for (int d = 0; d < a.dim; d += W) store_some(h + d, load_some(part + d, a.dim - d), a.dim - d);
    if (layer.cos) {
      const int64_t at = step.positions[t] * layer.rotary_dim;
      rotate(h, layer.cos + at, layer.sin + at, layer.rotary_dim, layer.rotary_interleaved);
    }
    if (kv < 0)
      for (int d = 0; d < a.dim; d += W) store_some(part + d, load_some(h + d, a.dim - d), a.dim - d);
    else if (a.slots[t] >= 0) store_key(a, layout, a.slots[t], kv, h);
  }

  // y = product, or x += m * product where no norm comes between
  void add_product(const T* from, int64_t depth, const Linear& w, const Layer& layer, const Norm& norm, Team& team) {
    const int64_t H = model.hidden;
    const Rows prepared = prepare_rows(from, depth, step.num_tokens, depth, rows, team);
    const float m = layer.residual_multiplier;
    const bool apart = norm.weight != nullptr;
    multiply<T, 1>(prepared, step.num_tokens, w, team, [&](int64_t row, int64_t column, const float* values) {
      float* to = (apart ? y : x) + row * H + column;
      const float* bias = w.bias ? w.bias + column : nullptr;
      for (int64_t j = 0; j < PANEL && column + j < H; j += W) {
        const int64_t left = H - column - j;
        vf v = load(values + j);
        if (bias) v += load_some(bias + j, left);
        store_some(to + j, apart ? v : load_some(to + j, left) + m * v, left);
      }
    });
  }

  void mlp(const Layer& layer, Team& team) {
    const T* from = layer.parallel && layer.pre_mlp_norm.weight ? normed_too : normed;
    const Rows prepared = prepare_rows(from, model.hidden, step.num_tokens, model.hidden, rows, team);
    const int64_t size = layer.down.depth;
    const float *bias = layer.gate_up.bias, *up_bias = bias ? bias + size : nullptr;
    if (layer.gated) {
      multiply<T, 2>(prepared, step.num_tokens, layer.gate_up, team, [&](int64_t row, int64_t pair, const float* gate) {
        const int64_t column = pair / 2;
        const float* up = gate + ROWS * PANEL;
        for (int64_t j = 0; j < PANEL && column + j < size; j += W) {
          const int64_t left = size - column - j;
          vf g = load(gate + j), u = load(up + j);
          if (bias) g += load_some(bias + column + j, left), u += load_some(up_bias + column + j, left);
          store_some(active + row * size + column + j, activate(layer.activation, g) * u, left);
        }
      });
      return;
    }
    const Linear& up = layer.gate_up;
    multiply<T, 1>(prepared, step.num_tokens, up, team, [&](int64_t row, int64_t column, const float* values) {
      for (int64_t j = 0; j < PANEL && column + j < size; j += W) {
        const int64_t left = size - column - j;
        vf v = load(values + j);
        if (bias) v += load_some(bias + column + j, left);
        store_some(active + row * size + column + j, activate(layer.activation, v), left);
      }
    });
  }

  void head(Team& team) {
    const int64_t H = model.hidden, S = step.num_rows;
    team.stretches(S, 1, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; s++) {
        norm_row(model.final_norm, x + step.rows[s] * H, H, normed + s * H);
        for (int t = 0; t < team.size; t++) best[t * S + s] = NOTHING;  // for each: any thread may come late
      }
    });
    head_in<T>(model, step, prepare_rows(normed, H, S, H, rows, team), best, team);
  }
};

}  // namespace
