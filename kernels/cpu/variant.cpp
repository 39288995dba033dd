// The whole library for one instruction set. Compiled several times, each with its own flags and NAME.
#include "decoder.h"
#include "sampler.h"

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#define TEXT2(a) #a
#define TEXT(a) TEXT2(a)

namespace {

// Calls f with a value of the type that `dtype` names.
template <class F>
auto typed(int32_t dtype, F f) {
  switch (dtype) {
    case BF16: return f(bf16{});
    case F16: return f(fp16{});
    default: return f(float{});
  }
}

void pack(int32_t dtype, const void* weight, int64_t rows, int64_t depth, int64_t first_column, int32_t stride,
          int32_t offset, void* packed, int32_t unpack, int32_t threads) {
  typed(dtype, [&](auto t) {
    using T = decltype(t);
    pack_rows((T*)weight, rows, depth, first_column, stride, offset, (T*)packed, unpack != 0, threads);
  });
}

int32_t linear(Workspace* ws, int32_t dtype, const void* x, int64_t x_row, int64_t rows, const Linear* w, void* out,
               int64_t out_row, int32_t threads) {
  return typed(dtype, [&](auto t) -> int32_t {
    using T = decltype(t);
    void* scratch = ws->buffers[Workspace::ROWS].need(rows_bytes<T>(rows, w->depth) + 1);
    if (!scratch) return NO_MEMORY;
    in_parallel(threads, [&](Team& team) {
      const Rows prepared = prepare_rows((const T*)x, x_row, rows, w->depth, scratch, team);
      linear_in(prepared, rows, *w, (T*)out, out_row, team);
    });
    return OK;
  });
}

void embed(int32_t dtype, const Linear* w, const int64_t* ids, int64_t count, void* out, int32_t threads) {
  typed(dtype, [&](auto t) {
    using T = decltype(t);
    in_parallel(threads, [&](Team& team) {
      team.stretches(count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++)
          for (int64_t k = 0; k < w->depth; k++)
            ((T*)out)[i * w->depth + k] =
                *element((T*)w->packed, w->depth, w->first_column + ids[i], w->panel_stride, w->panel_offset, k);
      });
    });
  });
}

int32_t attend(Workspace* ws, const Attention* a, int32_t threads) {
  if (a->dim > MOST_DIM || a->v_dim > MOST_DIM) return UNSUPPORTED;
  return typed(a->dtype, [&](auto t) {
    using T = decltype(t);
    if (a->kv_dtype == INT8) return attend_call<T, int8_t>(*ws, *a, threads);
    return attend_call<T, T>(*ws, *a, threads);
  });
}

int32_t step(Workspace* ws, const Model* model, const Step* work, int32_t threads) {
  return typed(model->dtype, [&](auto t) {
    using T = decltype(t);
    return Decoder<T>(*ws, *model, *work, threads).run();
  });
}

int32_t sample(Workspace* ws, float* logits, int64_t row_stride, int64_t vocab, Draw* draws, int64_t count,
               int32_t threads) {
  return sample_rows(*ws, logits, row_stride, vocab, draws, count, threads);
}

}  // namespace

extern const Table JOIN(table_, NAME);
const Table JOIN(table_, NAME) = {TEXT(NAME), pack, linear, embed, attend, step, sample};
