package claims

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// Claim is the right of a session to one key. It is a value: it can be stored as JSON or sent to another
// process. To let another process use it, detach it with [Keys.Detach].
type Claim struct {
	Key     tenure.Key `json:"key"` // its Type is the kind
	Session string     `json:"session"`
	Token   int64      `json:"token"` // of two claims on one key, the later one always has the greater token

	// Attempt is the number of times the row has been taken, if [QueueConfig.Attempts] is set. Attempts that
	// were taken back do not count.
	Attempt int `json:"attempt,omitempty"`

	// Row says that the claim is on a row of a [Queue], whose table is the kind.
	Row bool `json:"row,omitempty"`
}

const claimKey objects.RightKey = "claim"

// ClaimFromContext returns the claim for which [Keys.Do] or [Worker.Do] has called a func. It returns a zero
// claim if ctx is not derived from the context of such a call.
func ClaimFromContext(ctx context.Context) Claim {
	c, _ := ctx.Value(claimKey).(Claim)
	return c
}

func (c Claim) String() string { return c.Key.String() }

func (c Claim) row() objects.Claim {
	return objects.Claim{Kind: c.Key.Type, ID: c.Key.ID, Session: c.Session, Token: c.Token}
}

func claimOf(kind, session string, r objects.Claim, ofRow bool) Claim {
	return Claim{Key: tenure.Key{Type: kind, ID: r.ID}, Session: session, Token: r.Token, Attempt: r.Attempts, Row: ofRow}
}

func rowsOf(claims []Claim) []objects.Claim {
	rows := make([]objects.Claim, 0, len(claims))
	for _, c := range claims {
		rows = append(rows, c.row())
	}
	return rows
}

var _ tenure.Guard = Claim{}

// longestIdle is how long a transaction on Postgres that a claim fences, or that finishes rows, may idle at most.
const longestIdle = time.Minute

// Fence implements [tenure.Guard], so a claim fences writes as a term does. Pass the claim to Fenced and
// FenceStatement of [tenure.PostgresStore] and [tenure.SQLiteStore], to [tenure.FencedTx], or to
// [tenure.Fence]. They write only if the key has been neither freed nor claimed by another session since.
// Otherwise they return [tenure.ErrLost], and nothing is written. On Postgres they lock the claim's row only for
// the check at the end. Any process that was given the claim may write under it. After a failover or a restart
// of the database the error is [tenure.ErrMoved], and nothing is written, until the session has renewed its record
// there, which it does at once if it is one of this process and store: retry.
//
// The claim of a row is compared with the row itself, which the same transaction may change. The process must
// have made a [Queue] on the row's table with that store, but not necessarily the queue that took the row.
// Otherwise the error is [tenure.ErrInvalid].
func (c Claim) Fence() (*objects.Fence, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	row := c.row()
	row.Row = c.Row
	return &objects.Fence{
		ID: objects.ID(c.Key), Claim: &row, Idle: longestIdle,
		Yield: func(context.Context) {},
		Refused: func(_ *objects.Row, why error) error {
			if why != nil {
				return fmt.Errorf("%w (its row can't be read: %w)", tenure.ErrLost, why)
			}
			return tenure.ErrLost
		},
	}, nil
}

func (c Claim) validate() error {
	if c.Session == "" || c.Token <= 0 {
		return fmt.Errorf("%w: no claim is given: %q has no session or no token", tenure.ErrInvalid, c)
	}
	return errors.Join(c.Key.Validate(), objects.ValidText("session", c.Session))
}

// validClaims rejects an empty list, values that are not claims, and claims that are given twice.
func validClaims(claims []Claim) error {
	if len(claims) == 0 {
		return fmt.Errorf("%w: no claims are given", tenure.ErrInvalid)
	}
	var errs []error
	seen := make(map[tenure.Key]bool, len(claims))
	for _, c := range claims {
		if seen[c.Key] {
			errs = append(errs, fmt.Errorf("%w: the claim of %s is given twice", tenure.ErrInvalid, c))
		}
		seen[c.Key] = true
		errs = append(errs, c.validate())
	}
	return errors.Join(errs...)
}

// EndedError reports that some of the claims on which a call depends have ended: their rows were freed,
// deleted, or taken by another session. The call has written nothing, unless it was [Queue.FinishEach].
// EndedError matches [tenure.ErrLost], and if the application has canceled one of the rows, [ErrCanceled] too.
type EndedError struct {
	Claims   []Claim // that have ended
	canceled bool
}

// ErrCanceled says that the application has canceled the row of a claim, as [QueueConfig.Canceled] says.
var ErrCanceled = errors.New("the row was canceled")

func (e *EndedError) Error() string {
	const most = 5 // named in the text
	var names []string
	for _, c := range e.Claims[:min(len(e.Claims), most)] {
		names = append(names, c.String())
	}
	if more := len(e.Claims) - most; more > 0 {
		names = append(names, fmt.Sprint(more, " more"))
	}
	how := "finished, freed, deleted or taken by another"
	if e.canceled {
		how = "canceled, " + how
	}
	return fmt.Sprintf("%v: %s: %s", tenure.ErrLost, how, strings.Join(names, ", "))
}

// Is makes the error match [tenure.ErrLost], and [ErrCanceled] if a row was canceled.
func (e *EndedError) Is(target error) bool {
	return target == tenure.ErrLost || e.canceled && target == ErrCanceled
}

// valueLimit is the time limit of a statement that is sent without a session.
const valueLimit = 10 * time.Second

// ReleaseDetached frees the keys of claims that another process has detached and handed to this one, see
// [Keys.Detach]. A process must use [Keys.Release] for its own claims. Otherwise its session would not know
// that the keys are free, and a func could go on working on a key that another process has.
//
// If one of the claims has ended, the error is [tenure.ErrLost]. If one is given twice, it is
// [tenure.ErrInvalid]. In both cases none is released. After any other error, the claims may or may not
// have been released. ReleaseDetached is safe for concurrent use.
func ReleaseDetached(ctx context.Context, store tenure.Store, claims ...Claim) error {
	return opError("release detached claims", releaseDetached(ctx, store, claims))
}

func releaseDetached(ctx context.Context, store tenure.Store, claims []Claim) error {
	backend, err := backendOf(store)
	if err == nil {
		err = validClaims(claims)
	}
	if err != nil {
		return err
	}
	table := &ownerTable{backend.Claims(), new(groups), valueLimit, true, ""}
	type owner struct{ kind, session string }
	owners := make(map[owner][]objects.Claim)
	for _, c := range claims {
		o := owner{c.Key.Type, c.Session}
		owners[o] = append(owners[o], c.row())
	}
	for o, rows := range owners {
		ended, _, err := table.standing(ctx, o.kind, rows)
		if err != nil {
			return err
		}
		if len(ended) > 0 {
			return fmt.Errorf("%w: %s/%s was freed, or another has claimed it", tenure.ErrLost, o.kind, ended[0].ID)
		}
	}
	for o, rows := range owners {
		for tries := 0; len(rows) > 0; tries++ {
			if rows, err = table.rows.Free(ctx, o.session, o.kind, idsOf(rows), tokensOf(rows), objects.Freeing{}, valueLimit); err != nil {
				return err
			}
			if len(rows) > 0 && !awaitUnlocked(ctx, tries) { // a write that is about to commit has locked them
				return context.Cause(ctx)
			}
		}
		wake(store, keyOf(o.kind), valueLimit)
	}
	return nil
}

// opError adds the failed operation to an error. It returns nil for nil.
func opError(operation string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("claims: %s: %w", operation, err)
}
