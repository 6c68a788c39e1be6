// The formats of keys and values that this library reads and writes.
#include "kv_rows.h"

#include <cstring>

#define KV_NAME(number, name) #name "\n"

// The name changes with the layout of a row: a library of an older layout lacks it.
// Whether these are the formats: one name a line, in the order of the numbers.
extern "C" long qwen_kv_rows(const char *names) { return !strcmp(names, KV_FORMATS(KV_NAME)); }
