// Threads that wait politely: they spin for some microseconds and then sleep, so that a busy process beside this one
// costs its share of the cores and no more.
#pragma once

#include <atomic>
#include <cstdint>

namespace magicdec {

// One thread of a parallel region. Work is divided by `index` of `count`; sums never depend on `count`.
class Team {
  public:
    const int index, count;
    // Waits until all threads of the region have come here; what they wrote before is visible afterwards.
    void barrier() const;

    Team(int index, int count, void *pool) : index(index), count(count), pool_(pool) {}

  private:
    void *pool_;
};

using Task = void (*)(const Team &, void *context);

// Runs task on all threads of the pool, the caller being number 0; returns when all are done. One region at a time:
// callers from several threads wait for each other.
void run_parallel(Task task, void *context);

// As above with a callable: run_parallel([&](const Team &team) { ... }).
template <class Callable> void run_parallel(Callable &&callable) {
    run_parallel([](const Team &team, void *context) { (*static_cast<Callable *>(context))(team); }, &callable);
}

// Returns when `word` is no longer `old`: spins for some microseconds, then sleeps until it is notified.
void await_change(const std::atomic<uint32_t> &word, uint32_t old);

void set_num_threads(int count);
int num_threads();

// The part of `size` items that a thread has, in pieces of `grain`: first .. last.
struct Share {
    int64_t first, last;
};
inline Share share_of(int64_t size, int64_t grain, const Team &team) {
    const int64_t pieces = (size + grain - 1) / grain;
    const int64_t first = pieces * team.index / team.count * grain, last = pieces * (team.index + 1) / team.count * grain;
    return {first < size ? first : size, last < size ? last : size};
}

} // namespace magicdec
