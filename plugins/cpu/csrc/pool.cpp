#include "pool.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace magicdec {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kChecksPerClock = 64; // reading the clock costs as much as many looks at the flag

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

class Barrier {
  public:
    void reset(int count) { count_ = count; }

    void arrive() {
        const uint32_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            round_.notify_all();
        } else {
            await_change(round_, round);
        }
    }

  private:
    int count_ = 1;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

class Pool {
  public:
    explicit Pool(int count) { resize(count); }
    ~Pool() { stop(); }

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    void resize(int count) {
        stop();
        barrier_.reset(count);
        stopping_ = false;
        const uint32_t seen = region_.load();
        for (int index = 1; index < count; ++index) workers_.emplace_back([this, index, seen] { work(index, seen); });
    }

    void run(Task task, void *context) {
        task_ = task, context_ = context;
        if (size() == 1) return task(Team(0, 1, this), context);
        region_.fetch_add(1, std::memory_order_release);
        region_.notify_all();
        task(Team(0, size(), this), context);
        barrier_.arrive();
    }

    void barrier() {
        if (size() > 1) barrier_.arrive();
    }

  private:
    void work(int index, uint32_t seen) {
        for (;;) {
            await_change(region_, seen);
            ++seen;
            if (stopping_) return;
            task_(Team(index, size(), this), context_);
            barrier_.arrive();
        }
    }

    void stop() {
        stopping_ = true;
        region_.fetch_add(1, std::memory_order_release);
        region_.notify_all();
        for (auto &worker : workers_) worker.join();
        workers_.clear();
    }

    std::vector<std::thread> workers_;
    Barrier barrier_;
    alignas(64) std::atomic<uint32_t> region_{0};
    Task task_ = nullptr;
    void *context_ = nullptr;
    std::atomic<bool> stopping_{false};
};

std::mutex mutex;
int wanted = static_cast<int>(std::thread::hardware_concurrency());
// Never deleted: threads must not be joined while a process ends. A forked child has no threads and makes its own.
Pool *pool = nullptr;

#if defined(__unix__) || defined(__APPLE__)
const int at_fork = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] {
    pool = nullptr;
    mutex.unlock();
});
#endif

} // namespace

void await_change(const std::atomic<uint32_t> &word, uint32_t old) {
    const auto start = std::chrono::steady_clock::now();
    do {
        for (int check = 0; check < kChecksPerClock; ++check) {
            if (word.load(std::memory_order_acquire) != old) return;
            relax();
        }
    } while (std::chrono::steady_clock::now() - start < kSpin);
    word.wait(old, std::memory_order_acquire);
}

void Team::barrier() const { static_cast<Pool *>(pool_)->barrier(); }

void run_parallel(Task task, void *context) {
    std::lock_guard<std::mutex> lock(mutex);
    if (pool == nullptr) pool = new Pool(wanted);
    pool->run(task, context);
}

void set_num_threads(int count) {
    std::lock_guard<std::mutex> lock(mutex);
    wanted = count;
    if (pool != nullptr && pool->size() != count) pool->resize(count);
}

int num_threads() {
    std::lock_guard<std::mutex> lock(mutex);
    return wanted;
}

} // namespace magicdec
