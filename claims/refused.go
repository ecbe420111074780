package claims

import (
	"errors"
	"slices"

	"github.com/tenurelib/tenure/internal/objects"
)

// isRefused reports whether a statement has written nothing because a constraint or a trigger
// of the user's refuses one of its rows.
func isRefused(err error) bool { return errors.As(err, new(*objects.Refused)) }

// exceptRefused calls write with all items. If the database refuses one of them, it finds out
// by halves which one that is, so that each is written that is not refused; of the others it
// tells refused. It ends at any other error.
func exceptRefused[T any](items []T, write func([]T) error, refused func(item T, err error)) error {
	err := write(items)
	if !isRefused(err) {
		return err
	}
	if len(items) == 1 {
		refused(items[0], err)
		return nil
	}
	for half := range slices.Chunk(items, (len(items)+1)/2) {
		if err := exceptRefused(half, write, refused); err != nil {
			return err
		}
	}
	return nil
}
