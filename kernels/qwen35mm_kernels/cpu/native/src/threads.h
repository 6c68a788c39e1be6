// Loops over tasks on torch's threads: a second pool on the same cores would compete with them.
#pragma once

#include <algorithm>
#include <atomic>

// GOMP_parallel of the OpenMP runtime that torch has loaded. LLVM's and Intel's runtimes have this GNU interface, too.
using TeamRunner = void (*)(void (*)(void *), void *, unsigned, unsigned);
extern TeamRunner run_team;

// Calls body(task) once for every task in [0, num_tasks), on up to num_threads threads. Any thread may take any task:
// results must not depend on it.
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

// Elements worth a separate task, and elements worth waking threads.
constexpr long TASK_ELEMENTS = 1 << 14, THREADS_ELEMENTS = 1 << 16;

// Calls body(row) for rows of `size` elements, several rows a task.
template <class Body>
void over_rows(long num_rows, long size, long num_threads, const Body &body) {
    const long per_task = std::max(1L, TASK_ELEMENTS / std::max(size, 1L));
    const long num_tasks = (num_rows + per_task - 1) / per_task;
    parallel(num_tasks, num_rows * size < THREADS_ELEMENTS ? 1 : int(num_threads), [&](long task) {
        for (long row = task * per_task; row < std::min(num_rows, (task + 1) * per_task); row++) body(row);
    });
}
