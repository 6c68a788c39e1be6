// Strided tensors from Python.
#pragma once

// [tokens][heads] rows of values. The strides between tokens and between heads are in values.
struct Strided {
    const void *data;
    long row, head;
};

template <class T>
static inline const T *place(const Strided &x, long token, long head) {
    return static_cast<const T *>(x.data) + token * x.row + head * x.head;
}
