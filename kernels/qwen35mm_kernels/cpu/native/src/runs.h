// Loops whose bodies know the number of steps in a run at compile time.
#pragma once

#include <type_traits>

#include "simd.h"

template <int N>
using Count = std::integral_constant<int, N>;

// Cuts [first, end) into runs of LARGEST and, for the rest, of 4, 2 and 1: work(start, Count<length>).
template <int LARGEST, class Work>
INLINE void in_runs(long first, long end, const Work &work) {
    for (; first + LARGEST <= end; first += LARGEST) work(first, Count<LARGEST>{});
    if constexpr (LARGEST > 1) {
        constexpr int next = LARGEST > 4 ? 4 : LARGEST > 2 ? 2 : 1;
        in_runs<next>(first, end, work);
    }
}

// Calls work(Count<n>) for n from 1 to MOST.
template <int MOST, class Work>
INLINE void with_count(long n, const Work &work) {
    if constexpr (MOST > 1) {
        if (n < MOST) return with_count<MOST - 1>(n, work);
    }
    work(Count<MOST>{});
}

// Cuts [0, count) into the fewest runs of at most MOST, of about the same length: work(start, Count<length>).
template <int MOST, class Work>
INLINE void in_even_runs(long count, const Work &work) {
    const long runs = (count + MOST - 1) / MOST;
    for (long run = 0; run < runs; run++) {
        const long start = count * run / runs;
        with_count<MOST>(count * (run + 1) / runs - start, [&](auto length) { work(start, length); });
    }
}
