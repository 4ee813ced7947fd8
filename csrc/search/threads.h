// Work on several threads that never ends the process: what one throws is thrown again by the caller.
#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace realhf::search {

// Runs work(0) here and work(1), ..., work(number - 1) beside it, each on its own thread, and waits for all of them.
// Where the machine has no more threads, the work that is left is not done: it must not be needed for a right result.
inline void on_threads(int number, const std::function<void(int)>& work) {
    std::mutex mutex;
    std::exception_ptr thrown;
    const auto guarded = [&](int i) {
        try {
            work(i);
        } catch (...) {
            const std::lock_guard<std::mutex> lock(mutex);
            if (!thrown) thrown = std::current_exception();
        }
    };
    std::vector<std::thread> threads;
    threads.reserve(number);
    try {
        for (int i = 1; i < number; ++i) threads.emplace_back(guarded, i);
    } catch (const std::system_error&) {  // as many as there are
    }
    guarded(0);
    for (std::thread& thread : threads) thread.join();
    if (thrown) std::rethrow_exception(thrown);
}

}  // namespace realhf::search
