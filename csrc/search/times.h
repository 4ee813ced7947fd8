// The seconds of a transfer, from every row (of the source's options) to every column (of the target's).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace realhf::search {

// Seconds between places that have a kind and a mesh each. They depend on the two kinds and on how the two meshes lie to
// one another, of which there are few ways: a table of 94 million numbers has a million different ones.
struct PlacedTimes {
    struct Place {
        std::uint32_t kind, mesh;  // numbers, of a source times those of the targets there are
    };
    std::vector<Place> sources, targets;
    std::vector<std::uint32_t> begins;     // [kinds of sources x kinds of targets] in `numbers`
    std::vector<std::uint32_t> relations;  // [meshes of sources x meshes of targets] how they lie to one another
    std::vector<double> numbers;           // [pairs of kinds, and of each its relations]

    std::size_t position(std::size_t row, std::size_t column) const {
        const Place from = sources[row], to = targets[column];
        return begins[from.kind + to.kind] + relations[from.mesh + to.mesh];
    }
};

// Either all numbers of a table, row by row, or `PlacedTimes`. A problem may share them with who made them: nobody
// changes them.
class Times {
public:
    Times(std::shared_ptr<const PlacedTimes> placed, int num_columns)
        : placed_(std::move(placed)),
          begin_(placed_->numbers.data()),
          end_(begin_ + placed_->numbers.size()),
          num_columns_(num_columns),
          is_whole_(placed_->targets.size() == static_cast<std::size_t>(num_columns)),
          num_rows_(placed_->sources.size()) {}
    Times(std::vector<double> all, int num_columns)
        : all_(std::make_shared<const std::vector<double>>(std::move(all))),
          begin_(all_->data()),
          end_(begin_ + all_->size()),
          num_columns_(num_columns),
          is_whole_(num_columns >= 1 && all_->size() % num_columns == 0),
          num_rows_(is_whole_ ? all_->size() / num_columns : 0) {}

    double at(int row, int column) const {
        if (placed_) return begin_[placed_->position(row, column)];
        return begin_[static_cast<std::size_t>(row) * num_columns_ + column];
    }
    int num_columns() const { return num_columns_; }
    std::size_t num_rows() const { return num_rows_; }
    bool is_whole() const { return is_whole_; }  // every row has all columns

    // The numbers that occur, and maybe others.
    const double* begin() const { return begin_; }
    const double* end() const { return end_; }

private:
    std::shared_ptr<const PlacedTimes> placed_;
    std::shared_ptr<const std::vector<double>> all_;
    const double *begin_, *end_;  // of a plan's evaluation the inner loop reads them
    int num_columns_;
    bool is_whole_;
    std::size_t num_rows_;
};

}  // namespace realhf::search
