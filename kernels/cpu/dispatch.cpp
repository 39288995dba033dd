// Which variants there are, and which of them this processor runs. The functions here are all that is exported.
#include <cstring>

#include "team.h"
#include "api.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern const Table table_portable;
#if defined(__x86_64__)
extern const Table table_avx2, table_avx512, table_avx512_bf16;
#endif

// Fastest first; nullptr past the last one that runs here.
EXPORT const Table* hf_cb_table(int32_t index) {
  const Table* found[8];
  int count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) found[count++] = &table_avx512_bf16;
  if (avx512) found[count++] = &table_avx512;
  if (avx2) found[count++] = &table_avx2;
#endif
  found[count++] = &table_portable;
  return index >= 0 && index < count ? found[index] : nullptr;
}

EXPORT Workspace* hf_cb_workspace() { return new Workspace; }
EXPORT void hf_cb_workspace_free(Workspace* workspace) { delete workspace; }
EXPORT int32_t hf_cb_sizes(int32_t which) {  // of the structs, so that Python can tell a stale library
  const int32_t sizes[] = {sizeof(Linear), sizeof(Norm), sizeof(Attention), sizeof(Layer),
                           sizeof(Model),  sizeof(Step), sizeof(Draw)};
  return which >= 0 && which < 7 ? sizes[which] : 0;
}
