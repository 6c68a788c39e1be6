// Tensors that Python passes without making them dense.
#pragma once

// [tokens][heads] of rows of values: strides between tokens and between heads, in values.
struct Strided {
    const void *data;
    long row, head;
};

template <class T>
static inline const T *place(const Strided &x, long token, long head) {
    return static_cast<const T *>(x.data) + token * x.row + head * x.head;
}
