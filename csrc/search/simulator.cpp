// Algorithm 1 of the ReaL paper, table-driven.
#include "simulator.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <stdexcept>

namespace realhf::search {

Simulator::Simulator(const Problem& problem, int steps)
    : problem_(problem),
      graph_(problem, steps),
      num_calls_(static_cast<int>(problem.calls.size())),
      num_nodes_(problem.num_nodes()),
      transfers_of_(problem.transfers_of_calls()),
      placed_(num_calls_, -1),
      meshes_(num_calls_, Mesh{0, 0}),
      overlaps_(num_calls_ + 1, 0),
      durations_(num_nodes_, 0),
      stale_(problem.transfers.size(), 0),
      waits_(graph_.num_instances),
      ready_at_(graph_.num_instances),
      last_end_(num_calls_ + 1),
      ready_(graph_.num_instances) {
    for (int node = 0; node < num_nodes_; ++node) {
        std::vector<int> places = problem.places(node);
        if (places.empty()) places = {num_calls_};  // a place of no devices, which overlaps with nothing
        first_place_.push_back(places.front());
        second_place_.push_back(places.back());
    }
    for (int instance = 0; instance < graph_.num_instances; ++instance) {
        node_of_.push_back(instance % num_nodes_);
        if (graph_.num_parents[instance] == 0) initially_ready_.push_back({0, instance});
    }
    find_least_after();
    int labels = kMovesCommunicator + 1;
    for (const std::vector<int>& set : problem.communicators) labels = std::max(labels, set.empty() ? 0 : set.back() + 1);
    counted_at_.assign(labels, 0);
}

void Simulator::find_least_after() {
    std::vector<double> least(num_nodes_, 0);  // transfers may be free
    for (int i = 0; i < num_calls_; ++i) {
        least[i] = kInfinity;
        for (const Option& option : problem_.calls[i].options) least[i] = std::min(least[i], option.time);
    }
    least_after_.assign(graph_.num_instances, 0);
    for (auto at = graph_.order.rbegin(); at != graph_.order.rend(); ++at) {
        for (int child : graph_.children_of(*at)) {
            least_after_[*at] = std::max(least_after_[*at], least[node_of_[child]] + least_after_[child]);
        }
    }
    // The sums above and those of a simulation may round differently, and a limit may be met exactly.
    for (double& time : least_after_) time *= 1 - 1e-12;
}

void Simulator::place_call(int call, const Option& option) {
    const Mesh mesh{option.first, option.first + option.size};
    durations_[call] = option.time;
    if (meshes_[call].begin == mesh.begin && meshes_[call].end == mesh.end) return;
    meshes_[call] = mesh;
    std::uint64_t overlaps = 0;
    const std::uint64_t self = std::uint64_t{1} << call;
    for (int other = 0; other < num_calls_; ++other) {
        const std::uint64_t shares = mesh.begin < meshes_[other].end && meshes_[other].begin < mesh.end;
        overlaps |= shares << other;
        overlaps_[other] = (overlaps_[other] & ~self) | (shares << call);
    }
    overlaps_[call] = overlaps;
}

void Simulator::place(const Plan& plan) {
    bool any_stale = false;
    for (int call = 0; call < num_calls_; ++call) {
        if (placed_[call] == plan[call]) continue;
        placed_[call] = plan[call];
        place_call(call, problem_.calls[call].options[plan[call]]);
        for (int transfer : transfers_of_[call]) stale_[transfer] = 1, any_stale = true;
    }
    if (!any_stale) return;
    for (int i = 0; i < static_cast<int>(stale_.size()); ++i) {
        if (!stale_[i]) continue;
        const Transfer& transfer = problem_.transfers[i];
        durations_[num_calls_ + i] = problem_.transfer_time(transfer, plan[transfer.source], plan[transfer.target]);
        stale_[i] = 0;
    }
}

double Simulator::run(double limit, Trace* trace) {
    std::copy(graph_.num_parents.begin(), graph_.num_parents.end(), waits_.begin());
    std::fill(ready_at_.begin(), ready_at_.end(), 0.0);
    std::fill(last_end_.begin(), last_end_.end(), 0.0);
    std::copy(initially_ready_.begin(), initially_ready_.end(), ready_.begin());
    int num_ready = static_cast<int>(initially_ready_.size());
    Ready* const ready = ready_.data();
    if (trace) {
        for (const std::vector<int>& list : trace->behind) {
            for (int instance : list) ++waits_[instance];
        }
        const auto is_held = [&](const Ready& each) { return waits_[each.instance] > 0; };
        num_ready = static_cast<int>(std::remove_if(ready, ready + num_ready, is_held) - ready);
    }

    double makespan = 0;
    [[maybe_unused]] int taken = 0;
    while (num_ready > 0) {
        int next = 0;
        for (int i = 1; i < num_ready; ++i) {
            const bool earlier = ready[i].time < ready[next].time ||
                                 (ready[i].time == ready[next].time && ready[i].instance < ready[next].instance);
            next = earlier ? i : next;
        }
        const Ready current = ready[next];
        ready[next] = ready[--num_ready];
        const int node = node_of_[current.instance];
        const int first = first_place_[node], second = second_place_[node];

        double start = current.time;
        for_calls_beside(node, [&](int call) { start = std::max(start, last_end_[call]); });
        const double end = start + durations_[node];
        last_end_[first] = end;
        last_end_[second] = end;
        makespan = std::max(makespan, end);
        if (end + least_after_[current.instance] > limit) return kInfinity;
        ++taken;
        if (trace) {
            note(*trace, current.instance, start, end);
            for (int other : trace->behind[current.instance]) {
                if (--waits_[other] == 0) ready[num_ready++] = {ready_at_[other], other};
            }
        }
        for (int child : graph_.children_of(current.instance)) {
            ready_at_[child] = std::max(ready_at_[child], end);
            if (--waits_[child] == 0) ready[num_ready++] = {ready_at_[child], child};
        }
    }
    assert(trace || taken == graph_.num_instances);
    return makespan;
}

void Simulator::note(Trace& trace, int instance, double start, double end) const {
    const int node = node_of_[instance], number = static_cast<int>(trace.events.size());
    std::vector<int> waits = std::move(trace.waits[instance]);
    for_calls_beside(node, [&](int call) {
        if (trace.last[call] >= 0) waits.push_back(trace.last[call]);
    });
    std::sort(waits.begin(), waits.end());
    waits.erase(std::unique(waits.begin(), waits.end()), waits.end());
    trace.last[first_place_[node]] = trace.last[second_place_[node]] = number;
    for (int child : graph_.children_of(instance)) trace.waits[child].push_back(number);
    trace.events.push_back({node, instance / num_nodes_, start, end, std::move(waits)});
}

double Simulator::makespan(const Plan& plan, double limit) {
    place(plan);
    return run(limit, nullptr);
}

std::vector<Event> Simulator::trace(const Plan& plan, const std::vector<std::pair<int, int>>& order) {
    place(plan);
    const std::vector<std::vector<int>> none(graph_.num_instances);
    Trace trace{none, none, std::vector<int>(num_calls_ + 1, -1), {}};
    std::vector<int> last(num_calls_ + 1, -1);  // [calls + 1] the last instance of the order on the call's mesh
    for (const auto& [node, step] : order) {
        const int instance = step * num_nodes_ + node;
        if (node < 0 || node >= num_nodes_ || step < 0 || instance >= graph_.num_instances) {
            throw std::invalid_argument("an order names a node that is not there");
        }
        for_calls_beside(node, [&, own = instance](int call) {
            if (last[call] >= 0) trace.behind[last[call]].push_back(own);
        });
        last[first_place_[node]] = last[second_place_[node]] = instance;
    }
    run(kInfinity, &trace);
    if (static_cast<int>(trace.events.size()) < graph_.num_instances) {
        throw std::invalid_argument("the order breaks an edge");
    }
    return std::move(trace.events);
}

DeviceNeed Simulator::need_at(const Plan& plan, int device) {
    DeviceNeed need{0, 0, 0};
    // Most problems on a CPU have neither communicators nor copies that are sent.
    if (problem_.communicator_bytes > 0) need.communicators = problem_.communicator_bytes * communicators_at(plan, device);
    need.statics = need.communicators;
    double needed = 0;
    for (int i = 0; i < num_calls_; ++i) {
        const Option& option = problem_.chosen(plan, i);
        if (!option.is_on(device)) continue;
        if (problem_.is_at_home(plan, i)) need.statics += option.static_bytes;
        needed = std::max(needed, problem_.needed_bytes(plan, i, device));
    }
    need.peak = need.statics + needed;
    if (problem_.sending_bytes > 0 && sends_at(plan, device)) need.peak += problem_.sending_bytes;
    return need;
}

int Simulator::communicators_at(const Plan& plan, int device) {
    ++count_;
    int number = 0;
    const auto see = [&](int label) {
        number += counted_at_[label] != count_;
        counted_at_[label] = count_;
    };
    bool moves = false;
    for (int i = 0; i < num_calls_; ++i) {
        const Option& option = problem_.calls[i].options[plan[i]];
        const int home = problem_.calls[i].home;
        moves = moves || !option.same_layout(problem_.calls[home].options[plan[home]]);
        if (!option.is_on(device)) continue;
        for (int label : problem_.communicators[option.communicators]) see(label);
    }
    if (moves && number > 0) see(kMovesCommunicator);
    return number;
}

bool Simulator::sends_at(const Plan& plan, int device) const {
    for (int i = 0; i < num_calls_; ++i) {
        const Option& source = problem_.chosen(plan, problem_.source_of(i));
        if (source.is_on(device) && !problem_.chosen(plan, i).is_on(device)) return true;
    }
    return false;
}

double Simulator::peak_bytes(const Plan& plan) {
    // The first device of the call that begins last on a device has all calls that this device has.
    double peak = 0;
    for (int i = 0; i < num_calls_; ++i) {
        const Option& option = problem_.calls[i].options[plan[i]];
        peak = std::max(peak, need_at(plan, option.first).peak);
        // Behind a call's devices its home may have some that send to them.
        if (problem_.sending_bytes > 0) peak = std::max(peak, need_at(plan, option.first + option.size).peak);
    }
    return peak;
}

double Simulator::total_bytes(const Plan& plan) {
    std::array<int, 2 * kMaxCalls> borders;
    for (int i = 0; i < num_calls_; ++i) {
        const Option& option = problem_.calls[i].options[plan[i]];
        borders[2 * i] = option.first;
        borders[2 * i + 1] = option.first + option.size;
    }
    std::sort(borders.begin(), borders.begin() + 2 * num_calls_);
    double total = 0;
    for (int k = 0; k + 1 < 2 * num_calls_; ++k) {  // devices between two borders are all alike
        total += (borders[k + 1] - borders[k]) * need_at(plan, borders[k]).peak;
    }
    return total;
}

}  // namespace realhf::search
