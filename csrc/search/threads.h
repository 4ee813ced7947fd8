// Work on several threads that never ends the process: what one throws is thrown again by the caller.
#pragma once

#include <functional>
#include <future>
#include <system_error>
#include <vector>

namespace realhf::search {

// Runs work(0) here and work(1), ..., work(number - 1) beside it, each on its own thread, and waits for all of them.
// Where the machine has no more threads, the work that is left is not done: it must not be needed for a right result.
inline void on_threads(int number, const std::function<void(int)>& work) {
    std::vector<std::future<void>> others;  // which wait for their threads before they go
    try {
        for (int i = 1; i < number; ++i) others.push_back(std::async(std::launch::async, std::cref(work), i));
    } catch (const std::system_error&) {  // as many as there are
    }
    work(0);
    for (std::future<void>& other : others) other.get();
}

}  // namespace realhf::search
