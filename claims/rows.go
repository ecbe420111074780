package claims

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
)

// ErrOverdue is why a func's context ends at [RowsConfig.Deadline].
var ErrOverdue = errors.New("the claim's deadline has passed")

// Rows are claims of a session on the rows of one table of the user. The claim of a row stands in the row
// itself: which session owns it, and under which fencing token. Holding it costs nothing.
//
// A [Claim] of a row has the table's name as its Key.Type, and the ID as text in Key.ID.
//
// All methods are safe for concurrent use. Methods that are said to need no session can be used
// if [Session.Run] is never called.
type Rows struct {
	s   *Session
	cfg RowsConfig
}

// LostError is the error of a call that depends on claims of which some have ended: the rows were
// freed, or are another's, or were deleted. Then the call has written nothing. It is
// [tenure.ErrLost].
type LostError struct {
	Claims []Claim // that have ended
}

func (e *LostError) Error() string {
	const most = 5 // named in the text
	var names []string
	for _, c := range e.Claims[:min(len(e.Claims), most)] {
		names = append(names, c.String())
	}
	if more := len(e.Claims) - most; more > 0 {
		names = append(names, fmt.Sprint(more, " more"))
	}
	return fmt.Sprintf("%v: freed, deleted or taken by another: %s", tenure.ErrLost, strings.Join(names, ", "))
}

// Is makes the error match [tenure.ErrLost].
func (e *LostError) Is(target error) bool { return target == tenure.ErrLost }

// NewRows returns the rows of a table as claims of a session, which has at most one Rows for each table. It does no I/O.
// An [tenure.ErrInvalid] names everything that is wrong with the config.
func NewRows(s *Session, cfg RowsConfig) (*Rows, error) {
	return nil, errors.ErrUnsupported
}

// Check returns a [tenure.ErrSetup] if the table is not fit for claims. Its text says what is
// missing, with the DDL that adds it. The first statement checks too, so calling it is only of use to fail
// at start. It needs no session.
func (r *Rows) Check(ctx context.Context) error { return errors.ErrUnsupported }

// Take takes at most n rows that are free and ready, in order, and at most 1,000; it waits until there is at
// least one. Rows that somebody else has locked are passed over. Calls at the same time share a
// statement. Take waits while there is no session; [ErrClosed] says that there will be none.
// Errors of the store do not end it, except [tenure.ErrSetup].
//
// Rows that were taken before ctx was done are returned without an error. The caller works on each, by [Rows.Do] or on its own, and ends its
// claim by a Finish method, Release or ReleaseAfter. An attempt is counted when a row is taken,
// even if nobody learns of it.
func (r *Rows) Take(ctx context.Context, n int) ([]Claim, error) { return nil, errors.ErrUnsupported }

// TakeFor takes at most n rows that are free and ready for another session, by its ID, and does
// not wait: it may return none. It is for the server of workers that don't reach the database
// themselves, see [tenure.Lease.Resume]. The claims are the worker's, and this process does not hold them. If the
// answer is lost, [Rows.OwnedBy] returns what was taken. It needs no session.
func (r *Rows) TakeFor(ctx context.Context, session string, n int) ([]Claim, error) {
	return nil, errors.ErrUnsupported
}

// OwnedBy returns all claims of a session on rows of the table, by its ID. It needs no session.
func (r *Rows) OwnedBy(ctx context.Context, session string) ([]Claim, error) {
	return nil, errors.ErrUnsupported
}

// Do calls fn with a context that ends when the claim does, and frees the row when fn has
// returned unless fn has ended the claim itself. Otherwise it is as [Keys.Do]. At
// [RowsConfig.Deadline] the cause is [ErrOverdue], which is then an error of Do as well.
func (r *Rows) Do(ctx context.Context, c Claim, fn func(context.Context) error) error {
	return errors.ErrUnsupported
}

// Release gives rows back: others may take them at once. The rows of this session it releases as
// [Keys.Release] does: a func of Do is told to return, and waited for. Those of
// other sessions, or that were passed on, it releases by value, see [Rows.PassOn].
//
// If one of the claims has ended, it returns a [*LostError] and none is released.
func (r *Rows) Release(ctx context.Context, claims ...Claim) error { return errors.ErrUnsupported }

// ReleaseAfter gives rows back, and nobody takes them for that long by the database's clock. It
// does not wait for funcs: one that releases its own row returns afterwards. Without
// [RowsConfig.NotBefore] it is [tenure.ErrInvalid]. It needs no session.
//
// If one of the claims has ended, it returns a [*LostError] and none is released.
func (r *Rows) ReleaseAfter(ctx context.Context, d time.Duration, claims ...Claim) error {
	return errors.ErrUnsupported
}

// PassOn is [Keys.PassOn]: another process, or this one by value, finishes or releases the rows.
func (r *Rows) PassOn(claims ...Claim) error { return errors.ErrUnsupported }

// Holds reports whether this session holds the claim, and may rely on it: see
// [tenure.Term.Valid]. It does no I/O.
func (r *Rows) Holds(c Claim) bool { return false }

// Len returns how many claims the session holds.
func (r *Rows) Len() int { return 0 }

// Wake wakes those that wait for rows, in other processes too. Call it after rows were added, once
// for all of them. Errors don't matter: a hint may be lost in any case.
func (r *Rows) Wake() {}
