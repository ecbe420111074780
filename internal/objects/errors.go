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
	ErrClosed   = errors.New("store is closed for good")
)

// IsClosed reports whether err says that a store, or the client that it uses, was closed: no later call can succeed.
// The handles of database/sql and of pgxpool have an error for that, but don't export it.
func IsClosed(err error) bool {
	return errors.Is(err, ErrClosed) ||
		err != nil && (strings.Contains(err.Error(), "sql: database is closed") || strings.HasSuffix(err.Error(), "closed pool"))
}

// Closed returns an error as an [ErrClosed] if it is one by [IsClosed].
func Closed(err error) error {
	if IsClosed(err) && !errors.Is(err, ErrClosed) {
		return fmt.Errorf("%w: %w", ErrClosed, err)
	}
	return err
}

// ErrDrained says that nothing is claimed because the replica is drained.
var ErrDrained = errors.New("the replica is drained")

// ErrMoved says that a write has not reached the server that it names. It is an [ErrConflict].
var ErrMoved = fmt.Errorf("%w: the database is on another server than before, or has been restarted", ErrConflict)

// ErrInUse means that a process may not use a SQLite file, because another process uses it and one
// of the two assumes that it is alone, or because nobody can tell. It is an [ErrSetup].
var ErrInUse error = inUse{}

type inUse struct{}

func (inUse) Error() string        { return "the file is in use" }
func (inUse) Is(target error) bool { return target == ErrSetup }

// SetupError returns err, whose text says what to do, as an [ErrSetup].
func SetupError(err error) error { return setupError{err} }

type setupError struct{ error }

func (e setupError) Is(target error) bool { return target == ErrSetup }
func (e setupError) Unwrap() error        { return e.error }

// NoTable is the [ErrSetup] of a call that needs a table which does not exist.
type NoTable struct {
	Cause    error
	OfClaims bool // package claims creates it
}

func (e *NoTable) Error() string {
	migrate := "Migrate"
	if e.OfClaims {
		migrate = "claims.Migrate"
	}
	return fmt.Sprintf("%v: %v (call %s once)", ErrSetup, e.Cause, migrate)
}

func (e *NoTable) Is(target error) bool { return target == ErrSetup }
func (e *NoTable) Unwrap() error        { return e.Cause }

// Refusal reports whether err is one with which the store refuses a call: one of the contract's
// errors, which leave no doubt that nothing was written. After any other error, the
// write may have happened.
func Refusal(err error) bool {
	for _, answer := range []error{ErrNotFound, ErrExists, ErrConflict, ErrTaken, ErrInvalid, ErrSetup, ErrLost} {
		if errors.Is(err, answer) {
			return true
		}
	}
	return false
}

// Refused is the error of a statement that has written nothing because a constraint or a trigger
// refuses one of its rows. The other rows may be fine.
type Refused struct{ Cause error }

func (e *Refused) Error() string { return e.Cause.Error() }
func (e *Refused) Unwrap() error { return e.Cause }

// TooSlow is the error of a statement that the database has ended at its time limit. The statement
// has written nothing. A smaller one may be fast enough.
type TooSlow struct{ Cause error }

func (e *TooSlow) Error() string { return e.Cause.Error() }
func (e *TooSlow) Unwrap() error { return e.Cause }

// Conflict is the error of a write whose condition names a version that the object
// does not have.
type Conflict struct {
	ID      ID
	Wanted  int64
	Current int64 // 0 if there is no object
}

func (e *Conflict) Error() string {
	if e.Current == 0 {
		return fmt.Sprintf("%v: wanted version %d of %s, which is gone", ErrConflict, e.Wanted, e.ID)
	}
	return fmt.Sprintf("%v: wanted version %d of %s, which is at %d", ErrConflict, e.Wanted, e.ID, e.Current)
}

// Is makes the error match [ErrConflict].
func (e *Conflict) Is(target error) bool { return target == ErrConflict }

// FenceLost is part of the error with which a fence statement fails.
const FenceLost = "tenure: the term is over; records that stand: "

// Remedy ends the text of a fence statement that has failed. An ORM shows that text to whoever has forgotten the call.
const Remedy = "; call tenure.FenceError"

// Moved is part of the error with which a statement fails on Postgres that names another server, or that depends on a
// right whose record does.
const Moved = "tenure: another server than the one that was looked at: "

// PutConflict is part of the error with which a put statement fails on Postgres.
const PutConflict = "tenure: the object has another version; records that have this one: "

// IsFenceFailure reports whether a fence statement has failed because its term is over.
// Drivers have different error types, so the text decides.
func IsFenceFailure(err error) bool { return strings.Contains(err.Error(), FenceLost) }

// IsMoved reports whether a statement has failed with the text [Moved].
func IsMoved(err error) bool { return strings.Contains(err.Error(), Moved) }

// ValidText rejects text that Postgres can't store in a text column.
func ValidText(what, s string) error {
	if !utf8.ValidString(s) || strings.ContainsRune(s, 0) {
		return fmt.Errorf("%w: %s %q is not UTF-8 text without NUL", ErrInvalid, what, s)
	}
	return nil
}

// longestName is the greatest length of a name, in bytes. Names are in each line of the log.
const longestName = 256

// ValidName rejects what can't be the name of a replica, a holder, a worker or a kind.
func ValidName(what, s string) error {
	if len(s) > longestName {
		return fmt.Errorf("%w: %s has %d bytes, more than %d", ErrInvalid, what, len(s), longestName)
	}
	return ValidText(what, s)
}

// ValidList rejects arguments that no store can list objects with.
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

// ValidVersion rejects a version that no object can have.
func ValidVersion(v int64) error {
	if v <= 0 {
		return fmt.Errorf("%w: version %d is not positive", ErrInvalid, v)
	}
	return nil
}

// ValidTable rejects a name that a store's table can't have.
func ValidTable(table string) error {
	if at := len(table) - len(TombstonesSuffix); at >= 0 && strings.EqualFold(table[at:], TombstonesSuffix) {
		return fmt.Errorf("%w: Table %q ends in %q, which is for the tombstones of table %q",
			ErrInvalid, table, TombstonesSuffix, table[:at])
	}
	return ValidText("Table", table)
}
