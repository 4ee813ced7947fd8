// Lower bounds on the makespan of all plans of which something is known.
#include "bounds.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace realhf::search {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kRounds = 3;             // of fixing orders
constexpr double kRounding = 1 - 1e-12;  // quotients round; a bound must not be above what it bounds

}  // namespace

Bound::Bound(const Problem& problem, const std::vector<Segment>& segments)
    : problem_(problem),
      num_calls_(static_cast<int>(problem.calls.size())),
      durations_(problem.num_nodes()),
      areas_(problem.num_nodes()),
      adjacent_(num_calls_),
      beside_(problem.num_nodes()) {
    for (int node = 0; node < problem.num_nodes(); ++node) {
        std::uint64_t mask = 0;
        for (int call : problem.places(node)) mask |= std::uint64_t{1} << call;
        places_.push_back(mask);
    }
    for (const Segment& segment : segments) {
        const std::vector<double> zeros(segment.nodes.size(), 0.0);
        parts_.push_back({&segment, zeros, zeros, 0.0});
    }
}

double Bound::operator()(const std::vector<Outlook>& calls, const std::vector<double>& transfer_times, double limit) {
    if (!find_cliques(calls)) return kInfinity;
    for (int i = 0; i < num_calls_; ++i) {
        durations_[i] = calls[i].time;
        areas_[i] = calls[i].area;
    }
    for (std::size_t i = 0; i < transfer_times.size(); ++i) {
        int size = 0;
        for (int call : problem_.transfers[i].on) size = std::max(size, calls[call].size);
        durations_[num_calls_ + i] = transfer_times[i];
        areas_[num_calls_ + i] = transfer_times[i] * size;
    }
    for (std::size_t node = 0; node < places_.size(); ++node) {
        beside_[node] = places_[node];
        for (std::uint64_t rest = places_[node]; rest; rest &= rest - 1) {
            beside_[node] |= adjacent_[__builtin_ctzll(rest)];
        }
    }
    double total = 0;
    for (Part& part : parts_) {
        find_paths(part);
        total += part.segment->repeated * part.bound;
    }
    if (total > limit) return kInfinity;
    for (Part& part : parts_) {
        const double before = part.bound;
        part.bound = std::max({part.bound, by_area(part), by_cliques(part)});
        total += part.segment->repeated * (part.bound - before);
        if (total > limit) return kInfinity;
    }
    if (limit == kInfinity) return total * kRounding;
    for (Part& part : parts_) {
        const double before = part.bound, others = total - part.segment->repeated * before;
        if (!fix_orders(part, (limit - others) / part.segment->repeated)) return kInfinity;
        part.bound = std::max(part.bound, by_cliques(part));
        total = others + part.segment->repeated * part.bound;
        if (total > limit) return kInfinity;
    }
    return total * kRounding;
}

// Finds which calls certainly share devices; false if such calls do not fit into memory together.
bool Bound::find_cliques(const std::vector<Outlook>& calls) {
    std::fill(adjacent_.begin(), adjacent_.end(), 0);
    for (int a = 0; a < num_calls_; ++a) {
        for (int b = a + 1; b < num_calls_; ++b) {
            if (calls[a].first_end <= calls[b].last_begin || calls[b].first_end <= calls[a].last_begin) continue;
            adjacent_[a] |= std::uint64_t{1} << b;
            adjacent_[b] |= std::uint64_t{1} << a;
        }
    }
    cliques_.clear();
    const std::uint64_t all = num_calls_ == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << num_calls_) - 1;
    grow_clique(0, all, 0);
    for (const std::uint64_t clique : cliques_) {
        double statics = 0, dynamic = 0, communicators = 0;
        for (std::uint64_t rest = clique; rest; rest &= rest - 1) {
            const Outlook& call = calls[__builtin_ctzll(rest)];
            statics += call.static_bytes;
            dynamic = std::max(dynamic, call.dynamic_bytes);
            communicators = std::max(communicators, call.communicator_bytes);
        }
        if ((statics + dynamic + communicators) * kRounding > problem_.device_memory_bytes) return false;
    }
    return true;
}

// Bron and Kerbosch's enumeration of maximal cliques, with a pivot.
void Bound::grow_clique(std::uint64_t clique, std::uint64_t candidates, std::uint64_t excluded) {
    if (!candidates) {
        if (!excluded) cliques_.push_back(clique);
        return;
    }
    const std::uint64_t around_pivot = adjacent_[__builtin_ctzll(candidates)];
    for (std::uint64_t rest = candidates & ~around_pivot; rest; rest &= rest - 1) {
        const int call = __builtin_ctzll(rest);
        const std::uint64_t bit = std::uint64_t{1} << call;
        grow_clique(clique | bit, candidates & adjacent_[call], excluded & adjacent_[call]);
        candidates &= ~bit;
        excluded |= bit;
    }
}

void Bound::find_paths(Part& part) const {
    const Segment& segment = *part.segment;
    part.bound = 0;
    for (int v = 0; v < segment.size(); ++v) {
        double head = 0;
        for (int u : segment.parents[v]) head = std::max(head, part.head[u] + duration(part, u));
        part.head[v] = head;
    }
    for (int v = segment.size() - 1; v >= 0; --v) {
        double tail = 0;
        for (int w : segment.children[v]) tail = std::max(tail, duration(part, w) + part.tail[w]);
        part.tail[v] = tail;
        part.bound = std::max(part.bound, part.head[v] + duration(part, v) + tail);
    }
}

double Bound::by_area(const Part& part) const {
    const Segment& segment = *part.segment;
    const double devices = problem_.num_devices;
    double total = 0, bound = 0;
    for (int v = 0; v < segment.size(); ++v) {
        total += areas_[segment.nodes[v]];
        double before = 0, after = 0;
        for (int u : segment.before[v]) before += areas_[segment.nodes[u]];
        for (int w : segment.after[v]) after += areas_[segment.nodes[w]];
        const double head = std::max(part.head[v], before / devices), tail = std::max(part.tail[v], after / devices);
        bound = std::max(bound, head + duration(part, v) + tail);
    }
    return std::max(bound, total / devices) * kRounding;
}

double Bound::by_cliques(const Part& part) {
    double bound = 0;
    for (const std::uint64_t clique : cliques_) {
        if (clique & (clique - 1)) bound = std::max(bound, one_machine(part, clique));
    }
    return bound;
}

// Jackson's preemptive schedule: always the available job with the longest tail. Its length is the largest of
// min head + sum of durations + min tail over all subsets of the jobs.
double Bound::one_machine(const Part& part, std::uint64_t clique) {
    const Segment& segment = *part.segment;
    jobs_.clear();
    for (int v = 0; v < segment.size(); ++v) {
        if (places_[segment.nodes[v]] & clique) jobs_.push_back({part.head[v], part.tail[v], duration(part, v)});
    }
    double now = 0, bound = 0;
    for (;;) {
        Job* best = nullptr;
        double next = kInfinity, soonest = kInfinity;
        for (Job& job : jobs_) {
            if (job.left <= 0) continue;
            soonest = std::min(soonest, job.head);
            if (job.head <= now && (!best || job.tail > best->tail)) best = &job;
        }
        if (!best) {
            if (soonest == kInfinity) return bound;
            now = soonest;
            continue;
        }
        for (const Job& job : jobs_) {  // who could take over before it is done
            if (job.left > 0 && job.head > now && job.tail > best->tail) next = std::min(next, job.head);
        }
        const double step = std::min(best->left, next - now);
        if (step == best->left) {
            best->left = 0;
            now += step;
            bound = std::max(bound, now + best->tail);
        } else {
            best->left -= step;
            now = next;
        }
    }
}

bool Bound::fix_orders(Part& part, double limit) const {
    const Segment& segment = *part.segment;
    // Rounding must not make an order look too late.
    limit += 1e-9 * limit;
    for (int round = 0; round < kRounds; ++round) {
        bool changed = false;
        for (const auto& [u, v] : segment.unordered) {
            if (!(beside_[segment.nodes[u]] & places_[segment.nodes[v]])) continue;
            const double both = duration(part, u) + duration(part, v);
            const bool u_first = part.head[u] + both + part.tail[v] <= limit;
            const bool v_first = part.head[v] + both + part.tail[u] <= limit;
            if (u_first && v_first) continue;
            if (!u_first && !v_first) return false;
            const int first = u_first ? u : v, second = u_first ? v : u;
            const double head = part.head[first] + duration(part, first);
            const double tail = part.tail[second] + duration(part, second);
            if (head > part.head[second]) part.head[second] = head, changed = true;
            if (tail > part.tail[first]) part.tail[first] = tail, changed = true;
        }
        if (!changed) return true;
        for (int v = 0; v < segment.size(); ++v) {
            for (int u : segment.parents[v]) part.head[v] = std::max(part.head[v], part.head[u] + duration(part, u));
        }
        for (int v = segment.size() - 1; v >= 0; --v) {
            for (int w : segment.children[v]) part.tail[v] = std::max(part.tail[v], duration(part, w) + part.tail[w]);
            if (part.head[v] + duration(part, v) + part.tail[v] > limit) return false;
        }
    }
    return true;
}

}  // namespace realhf::search
