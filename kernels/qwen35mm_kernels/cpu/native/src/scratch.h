// Memory that a thread keeps for its next call. New large temporaries would get fresh pages every time.
#pragma once

#include <cstdlib>

template <class T, int WHICH>
T *scratch(long count) {
    static thread_local struct Buffer {
        void *memory = nullptr;
        unsigned long size = 0;
        ~Buffer() { free(memory); }
    } buffer;
    const unsigned long wanted = (count * sizeof(T) + 4095) / 4096 * 4096;
    if (buffer.size < wanted) {
        free(buffer.memory);
        buffer.memory = aligned_alloc(64, wanted);
        buffer.size = wanted;
    }
    return static_cast<T *>(buffer.memory);
}
