// A parallel region in phases that wait for work and not for threads: a thread that another process keeps from its core
// holds up nobody unless it has begun a piece, and finds its share done by others when it comes back.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "pool.h"

namespace magicdec {

class Phases {
  public:
    // Before the region.
    void reset(int64_t num_phases, int num_threads) {
        if (num_phases * (num_threads + 1) > size_) {
            size_ = num_phases * (num_threads + 1);
            counters_ = std::make_unique<Counter[]>(static_cast<size_t>(size_));
        }
        for (int64_t i = 0; i < num_phases * (num_threads + 1); ++i) counters_[i].value.store(0, std::memory_order_relaxed);
    }

    // Calls work(piece) for every piece 0 .. pieces - 1 once, on whichever thread is free: a thread takes its own
    // neighbouring pieces first. Returns when all are done. All threads call it, for the same phases in the same order.
    template <class Work> void run(const Team &team, int64_t phase, int64_t pieces, Work &&work) {
        Counter *counters = &counters_[phase * (team.count + 1)];
        uint32_t done = 0;
        for (int turn = 0; turn < team.count; ++turn) {
            const Team owner((team.index + turn) % team.count, team.count, nullptr);
            const Share share = share_of(pieces, 1, owner);
            const auto count = static_cast<uint32_t>(share.last - share.first);
            auto &next = counters[owner.index].value;
            while (next.load(std::memory_order_relaxed) < count) {
                const uint32_t index = next.fetch_add(1, std::memory_order_relaxed);
                if (index >= count) break;
                work(share.first + index);
                ++done;
            }
        }
        finish(counters[team.count].value, done, static_cast<uint32_t>(pieces));
    }

    // The same for work(next) that takes its pieces itself, by the counter `next`, and returns how many it has done.
    template <class Work>
    void take(const Team &team, int64_t phase, int64_t pieces, std::atomic<int64_t> &next, Work &&work) {
        finish(counters_[phase * (team.count + 1) + team.count].value, static_cast<uint32_t>(work(next)), static_cast<uint32_t>(pieces));
    }

  private:
    struct alignas(64) Counter {
        std::atomic<uint32_t> value{0};
    };

    // Adds what this thread has done; waits until all is.
    static void finish(std::atomic<uint32_t> &all, uint32_t done, uint32_t pieces) {
        uint32_t now = done > 0 ? all.fetch_add(done, std::memory_order_acq_rel) + done : all.load(std::memory_order_acquire);
        if (done > 0 && now == pieces) all.notify_all();
        for (; now != pieces; now = all.load(std::memory_order_acquire)) await_change(all, now);
    }

    std::unique_ptr<Counter[]> counters_;
    int64_t size_ = 0;
};

} // namespace magicdec
