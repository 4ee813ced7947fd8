// Lower bounds on the makespan of all plans of which something is known.
#include "bounds.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace realhf::search {
namespace {

constexpr int kRounds = 3;             // rounds that fix orders
constexpr double kRounding = 1 - 1e-12;  // quotients round; a bound must not be above what it bounds

}  // namespace

Bound::Bound(const Problem& problem, const std::vector<Segment>& segments, const std::vector<double>& prices)
    : problem_(problem),
      prices_(prices),
      num_calls_(static_cast<int>(problem.calls.size())),
      durations_(problem.num_nodes()),
      areas_(problem.num_nodes()),
      joints_(problem.num_nodes()),
      between_(problem.num_nodes()),
      gains_(problem.transfers.size()),
      adjacent_(num_calls_),
      beside_(problem.num_nodes()) {
    for (int node = 0; node < problem.num_nodes(); ++node) {
        std::uint64_t mask = 0;
        for (int call : problem.places(node)) mask |= std::uint64_t{1} << call;
        places_.push_back(mask);
    }
    for (const Segment& segment : segments) parts_.push_back(part_of(segment));
}

Bound::Part Bound::part_of(const Segment& segment) const {
    const std::vector<double> zeros(segment.nodes.size(), 0.0);
    Part part{&segment, zeros, zeros, 0.0, std::vector<bool>(segment.nodes.size(), false),
              std::vector<int>(segment.nodes.size(), -1)};
    for (int v = 0; v < segment.size(); ++v) {
        if (segment.nodes[v] < num_calls_) continue;
        const Transfer& transfer = problem_.transfers[segment.nodes[v] - num_calls_];
        const std::vector<int>&parents = segment.parents[v], &children = segment.children[v];
        part.joins_target[v] = children.size() == 1 && segment.nodes[children[0]] == transfer.target;
        if (part.joins_target[v] && parents.size() == 1 && segment.nodes[parents[0]] == transfer.source) {
            part.source[v] = parents[0];
        }
    }
    return part;
}

// The least times of transfers, alone and in sums. A call counts with the transfer that gains most by it.
void Bound::count_moves(const std::vector<Outlook>& calls, const std::vector<Move>& moves) {
    std::uint64_t used = 0;
    const auto ends = [&](int i) {
        const Transfer& transfer = problem_.transfers[i];
        return std::uint64_t{1} << transfer.source | std::uint64_t{1} << transfer.target;
    };
    for (int i = 0; i < static_cast<int>(moves.size()); ++i) {
        const Transfer& transfer = problem_.transfers[i];
        int size = 0;
        for (int call : transfer.on) size = std::max(size, calls[call].size);
        const int node = num_calls_ + i;
        durations_[node] = joints_[node] = between_[node] = moves[i].time;
        areas_[node] = moves[i].time * size;
        const double apart = moves[i].time + calls[transfer.source].time + calls[transfer.target].time;
        gains_[i] = transfer.source == transfer.target ? 0 : moves[i].with_both - apart;
    }
    for (;;) {
        int best = -1;
        for (int i = 0; i < static_cast<int>(moves.size()); ++i) {
            if (gains_[i] > (best < 0 ? 0 : gains_[best]) && !(used & ends(i))) best = i;
        }
        if (best < 0) return;
        const double target_s = calls[problem_.transfers[best].target].time;
        joints_[num_calls_ + best] = std::max(moves[best].time, moves[best].with_target - target_s);
        between_[num_calls_ + best] = moves[best].time + gains_[best];
        used |= ends(best);
    }
}

double Bound::operator()(const std::vector<Outlook>& calls, const std::vector<Move>& moves, double limit) {
    if (!find_cliques(calls)) return kInfinity;
    for (int i = 0; i < num_calls_; ++i) {
        durations_[i] = calls[i].time;
        areas_[i] = calls[i].area;
    }
    count_moves(calls, moves);
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
    return pays_for_memory(calls, limit) ? total * kRounding : kInfinity;
}

// Lagrangian: of calls that share a device, the static bytes of all and the dynamic bytes of one fit into its memory. With
// a price on these bytes, the options of the least time + price x bytes give a bound, less the price of all memory, which
// each instance of the calls pays once.
bool Bound::pays_for_memory(const std::vector<Outlook>& calls, double limit) {
    std::copy(durations_.begin(), durations_.end(), joints_.begin());
    std::copy(durations_.begin(), durations_.end(), between_.begin());
    for (const std::uint64_t clique : cliques_) {
        double communicators = 0, fastest = 0, fastest_dynamic = 0;
        int busiest = -1;
        for (std::uint64_t rest = clique; rest; rest &= rest - 1) {
            const int call = __builtin_ctzll(rest);
            communicators = std::max(communicators, calls[call].communicator_bytes);
            fastest += calls[call].fastest_static;
            fastest_dynamic = std::max(fastest_dynamic, calls[call].fastest_dynamic);
            if (busiest < 0 || calls[call].dynamic_bytes > calls[busiest].dynamic_bytes) busiest = call;
        }
        const double room = problem_.device_memory_bytes - communicators;
        if (fastest + fastest_dynamic <= room) continue;  // the fastest options fit
        const auto priced_at = [&](int k) {
            for (std::uint64_t rest = clique; rest; rest &= rest - 1) {
                const int call = __builtin_ctzll(rest);
                durations_[call] = joints_[call] = call == busiest ? calls[call].priced_busy[k] : calls[call].priced[k];
            }
            double total = 0;
            for (Part& part : parts_) {
                find_paths(part);
                total += part.segment->repeated * std::max(part.bound, one_machine(part, clique));
            }
            return (total - problem_.steps * prices_[k] * room) * kRounding;
        };
        // Concave in the price: uphill from where it was best the last time.
        double best = priced_at(best_price_);
        for (int direction : {1, -1}) {
            for (int k = best_price_ + direction; best <= limit && 0 <= k && k < kPrices; k += direction) {
                const double bound = priced_at(k);
                if (bound <= best) break;
                best = bound;
                best_price_ = k;
            }
        }
        if (best > limit) return false;
        for (std::uint64_t rest = clique; rest; rest &= rest - 1) {
            const int call = __builtin_ctzll(rest);
            durations_[call] = joints_[call] = calls[call].time;
        }
    }
    return true;
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
        for (int u : segment.parents[v]) {
            head = std::max(head, part.head[u] + joint(part, u));
            const int source = part.source[u];
            if (source >= 0) head = std::max(head, part.head[source] + duration(part, source) + between(part, u));
        }
        part.head[v] = head;
    }
    for (int v = segment.size() - 1; v >= 0; --v) {
        double tail = 0;
        for (int w : segment.children[v]) {
            tail = std::max(tail, joint(part, w) + part.tail[w]);
            if (part.source[w] != v) continue;
            const int target = segment.children[w][0];
            tail = std::max(tail, between(part, w) + duration(part, target) + part.tail[target]);
        }
        part.tail[v] = tail;
        part.bound = std::max(part.bound, part.head[v] + joint(part, v) + tail);
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
    const auto is_in = [&](int v) { return (places_[segment.nodes[v]] & clique) != 0; };
    const auto joins = [&](int v) {  // with its target in one job
        return joint(part, v) > duration(part, v) && is_in(v) && is_in(segment.children[v][0]);
    };
    for (int v = 0; v < segment.size(); ++v) {
        if (!is_in(v) || joins(v)) continue;
        if (segment.nodes[v] >= num_calls_ && duration(part, v) == 0) continue;
        jobs_.push_back({part.head[v], part.tail[v], duration(part, v)});
        if (segment.nodes[v] >= num_calls_) continue;
        for (int u : segment.parents[v]) {
            if (!joins(u)) continue;
            jobs_.back().head = part.head[u];
            jobs_.back().left += joint(part, u);
        }
    }
    std::sort(jobs_.begin(), jobs_.end(), [](const Job& a, const Job& b) { return a.head < b.head; });
    const auto shorter_tail = [this](int a, int b) { return jobs_[a].tail < jobs_[b].tail; };
    available_.clear();  // a heap
    double now = 0, bound = 0;
    for (std::size_t next = 0; next < jobs_.size() || !available_.empty();) {
        if (available_.empty()) now = std::max(now, jobs_[next].head);
        for (; next < jobs_.size() && jobs_[next].head <= now; ++next) {
            available_.push_back(static_cast<int>(next));
            std::push_heap(available_.begin(), available_.end(), shorter_tail);
        }
        Job& best = jobs_[available_.front()];
        if (next < jobs_.size() && now + best.left > jobs_[next].head) {
            best.left -= jobs_[next].head - now;
            now = jobs_[next].head;
            continue;
        }
        now += best.left;
        bound = std::max(bound, now + best.tail);
        std::pop_heap(available_.begin(), available_.end(), shorter_tail);
        available_.pop_back();
    }
    return bound;
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
            for (int u : segment.parents[v]) part.head[v] = std::max(part.head[v], part.head[u] + joint(part, u));
        }
        for (int v = segment.size() - 1; v >= 0; --v) {
            for (int w : segment.children[v]) part.tail[v] = std::max(part.tail[v], joint(part, w) + part.tail[w]);
            if (part.head[v] + duration(part, v) + part.tail[v] > limit) return false;
        }
    }
    return true;
}

}  // namespace realhf::search
