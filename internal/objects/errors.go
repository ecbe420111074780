package objects

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// The errors of the contract; the root package documents them.
var (
	ErrNotFound = errors.New("object not found")
	ErrExists   = errors.New("object exists already")
	ErrConflict = errors.New("version conflict")
	ErrTaken    = errors.New("id or name taken by another object")
	ErrInvalid  = errors.New("invalid argument")
	ErrSetup    = errors.New("store is not set up")
	ErrLost     = errors.New("lease lost")
)

// Answered reports whether err is an answer of the store: one of the contract's
// errors, which leave no doubt about what was written. After any other error of
// a write, it may have happened.
func Answered(err error) bool {
	for _, answer := range []error{ErrNotFound, ErrExists, ErrConflict, ErrTaken, ErrInvalid, ErrSetup, ErrLost} {
		if errors.Is(err, answer) {
			return true
		}
	}
	return false
}

// Conflict is the error of a write whose condition named another version than the
// object has.
type Conflict struct {
	Wanted  int64
	Current int64 // 0: the object is gone
}

func (e *Conflict) Error() string {
	return fmt.Sprintf("%v: wanted version %d, at %d", ErrConflict, e.Wanted, e.Current)
}

// Is makes the error match [ErrConflict].
func (e *Conflict) Is(target error) bool { return target == ErrConflict }

// FencedOut is the error of a fenced write whose fence did not hold.
type FencedOut struct {
	Now   *Row  // what stands in place of the record; nil: nothing, or it is not known
	Cause error // why it is not known what stands
}

func (e *FencedOut) Error() string {
	if e.Cause != nil {
		return fmt.Sprintf("%v (its record can't be read: %v)", ErrLost, e.Cause)
	}
	return ErrLost.Error()
}

// Is makes the error match [ErrLost].
func (e *FencedOut) Is(target error) bool { return target == ErrLost }

func (e *FencedOut) Unwrap() error { return e.Cause }

// FenceLost stands in the error by which a fence statement fails on Postgres.
const FenceLost = "the term is over; records that stand: "

// PutConflict stands in the error by which a put statement fails on Postgres.
const PutConflict = "the object has another version; records that have this one: "

// IsFenceFailure reports whether a fence statement has failed because its term is over.
// Drivers differ in their types, so it goes by the text: on Postgres by [FenceLost], on
// SQLite by the column of the tombstones that refused a NULL.
func IsFenceFailure(err error) bool {
	text := err.Error()
	return strings.Contains(text, FenceLost) || strings.Contains(text, TombstonesSuffix+".resource_version")
}

// ValidText refuses what Postgres cannot store in a text column.
func ValidText(what, s string) error {
	if !utf8.ValidString(s) || strings.ContainsRune(s, 0) {
		return fmt.Errorf("%w: %s %q is not UTF-8 text without NUL", ErrInvalid, what, s)
	}
	return nil
}

// ValidList refuses arguments with which no store can list objects.
func ValidList(objectType, after string, limit int) error {
	errs := []error{ValidText("object type", objectType), ValidText("after", after)}
	if objectType == "" {
		errs = append(errs, fmt.Errorf("%w: the object type is empty", ErrInvalid))
	}
	if limit < 1 {
		errs = append(errs, fmt.Errorf("%w: limit %d is not positive", ErrInvalid, limit))
	}
	return errors.Join(errs...)
}

// ValidVersion refuses a version that no object can have.
func ValidVersion(v int64) error {
	if v <= 0 {
		return fmt.Errorf("%w: version %d is not positive", ErrInvalid, v)
	}
	return nil
}

// ValidTable refuses a name that no store can give to its table.
func ValidTable(table string) error {
	if at := len(table) - len(TombstonesSuffix); at >= 0 && strings.EqualFold(table[at:], TombstonesSuffix) {
		return fmt.Errorf("%w: Table %q ends in %q, which is for the tombstones of table %q",
			ErrInvalid, table, TombstonesSuffix, table[:at])
	}
	return ValidText("Table", table)
}
