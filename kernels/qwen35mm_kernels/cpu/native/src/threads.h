// Loops over tasks on the threads that torch has: two pools on the same cores would wait for each other.
#pragma once

#include <algorithm>
#include <atomic>

// GOMP_parallel of the OpenMP runtime that torch has loaded: GNU's interface, which LLVM's and Intel's offer too.
using TeamRunner = void (*)(void (*)(void *), void *, unsigned, unsigned);
extern TeamRunner run_team;

// body(task) for every task in [0, num_tasks), each once, on up to num_threads threads. Which thread takes which task
// is left to chance: results must not depend on it.
template <class Body>
void parallel(long num_tasks, int num_threads, const Body &body) {
    if (num_tasks < num_threads) num_threads = int(num_tasks);
    if (num_threads <= 1 || !run_team) {
        for (long task = 0; task < num_tasks; task++) body(task);
        return;
    }
    struct Shared {
        const Body &body;
        long num_tasks;
        std::atomic<long> next{0};
    } shared{body, num_tasks};
    run_team(
        [](void *data) {
            Shared &all = *static_cast<Shared *>(data);
            for (long task; (task = all.next.fetch_add(1, std::memory_order_relaxed)) < all.num_tasks;) all.body(task);
        },
        &shared, unsigned(num_threads), 0);
}

// Elements that are worth a task of their own, and those that are worth waking threads for.
constexpr long TASK_ELEMENTS = 1 << 14, THREADS_ELEMENTS = 1 << 16;

// body(row) for rows of `size` elements, some of them a task.
template <class Body>
void over_rows(long num_rows, long size, long num_threads, const Body &body) {
    const long per_task = std::max(1L, TASK_ELEMENTS / std::max(size, 1L));
    const long num_tasks = (num_rows + per_task - 1) / per_task;
    parallel(num_tasks, num_rows * size < THREADS_ELEMENTS ? 1 : int(num_threads), [&](long task) {
        for (long row = task * per_task; row < std::min(num_rows, (task + 1) * per_task); row++) body(row);
    });
}
