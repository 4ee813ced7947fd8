// What a planning problem may be.
#include "problem.h"

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "unrolled.h"

namespace realhf::search {
namespace {

// The parts of the message are put together where it is needed: there are millions of numbers to look at.
template <typename... Parts>
void require(bool holds, const Parts&... parts) {
    if (!holds) throw std::invalid_argument((std::string("planning problem: ") + ... + parts));
}

bool is_amount(double number) { return 0 <= number && number <= kMaxNumber; }  // false for NaN

void check_call(const Problem& problem, int index) {
    const Call& call = problem.calls[index];
    const std::string name = "call " + std::to_string(index);
    require(call.home >= 0 && call.home < static_cast<int>(problem.calls.size()), name, " has no such home");
    require(!call.options.empty(), name, " has no option");
    for (double number : call.spared.bytes) {
        require(is_amount(number), name, " spares a negative, too large or missing number");
    }
    for (const Option& option : call.options) {
        require(option.first >= 0 && option.size >= 1 && option.size <= problem.num_devices - option.first,
                name, " has an option outside the devices");
        for (double number : {option.time, option.static_bytes, option.dynamic_bytes, option.copy_bytes}) {
            require(is_amount(number), name, " has an option with a negative, too large or missing number");
        }
        require(option.communicators >= 0 && option.communicators < static_cast<int>(problem.communicators.size()),
                name, " has an option with unknown communicators");
    }
}

void check_communicators(const Problem& problem) {
    for (double number : {problem.communicator_bytes, problem.sending_bytes}) {
        require(is_amount(number), "bytes of communicators and of sending must not be negative or too large");
    }
    for (const std::vector<int>& labels : problem.communicators) {
        require(labels.empty() || (labels.front() >= 0 && labels.back() <= kMaxLabel), "labels of communicators must be 0 to 2^20");
        require(std::adjacent_find(labels.begin(), labels.end(), std::greater_equal<>()) == labels.end(),
                "labels of communicators must ascend");
    }
}

void check_transfer(const Problem& problem, int index) {
    const Transfer& transfer = problem.transfers[index];
    const std::string name = "transfer " + std::to_string(index);
    const int num_calls = static_cast<int>(problem.calls.size());
    require(transfer.source >= 0 && transfer.source < num_calls && transfer.target >= 0 && transfer.target < num_calls,
            name, " is between unknown calls");
    require(transfer.on.size() <= 2, name, " must be on the devices of two calls at most");
    for (int call : transfer.on) require(call >= 0 && call < num_calls, name, " is on the devices of an unknown call");
    require(transfer.rows.size() == problem.calls[transfer.source].options.size() &&
                transfer.columns.size() == problem.calls[transfer.target].options.size(),
            name, " needs a row for every option of its source and a column for every one of its target");
    const Times& times = transfer.times;
    require(times.is_whole(), name, " has an incomplete table");
    for (int row : transfer.rows) {
        require(row >= 0 && static_cast<std::size_t>(row) < times.num_rows(), name, " lacks a row");
    }
    for (int column : transfer.columns) require(column >= 0 && column < times.num_columns(), name, " lacks a column");
    for (double time : times) {
        require(is_amount(time), name, " has a negative, too large or missing time");
    }
}

}  // namespace

void Problem::check() const {
    require(num_devices >= 1 && steps >= 1 && max_steps_in_flight >= 1 && device_memory_bytes > 0,
            "devices, memory, steps and steps in flight must be positive");
    require(num_devices <= kMaxDevices && device_memory_bytes <= kMaxNumber, "too many devices, or too large ones");
    require(!calls.empty() && calls.size() <= kMaxCalls, "there must be 1 to 64 calls");
    require(calls.size() + transfers.size() <= static_cast<std::size_t>(kMaxInstances / steps),
            "calls and transfers x steps must not be more than " + std::to_string(kMaxInstances));
    check_communicators(*this);
    for (int i = 0; i < static_cast<int>(calls.size()); ++i) check_call(*this, i);
    for (int i = 0; i < static_cast<int>(transfers.size()); ++i) check_transfer(*this, i);
    for (int node = 0; node < num_nodes(); ++node) {
        require(parents(node).size() <= kMaxParents, "a node waits for too many others");
        for (const Parent& parent : parents(node)) {
            require(parent.node >= 0 && parent.node < num_nodes() && parent.steps_back >= 0, "unknown parent");
        }
    }
    for (const KeptCopy& copy : kept) {
        require(copy.source >= 0 && copy.source < static_cast<int>(calls.size()), "a copy of an unknown call is kept");
    }
    const Unrolled step(*this, 1);
    require(step.order.size() == static_cast<std::size_t>(step.num_instances), "the nodes of a step form a cycle");
}

}  // namespace realhf::search
