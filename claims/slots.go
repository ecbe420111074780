package claims

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

const (
	// mostSlots is the largest number of slots that a name may have.
	mostSlots = 1000

	// mostSpread is the time after a hint in which processes try to take a slot, each at a random moment,
	// so that each has the same chance.
	mostSpread = 2 * time.Millisecond
)

// Slots are N permits under one name. At most one claim holds each of them, so at most N jobs of that name run
// at the same time, in all processes together. Each slot is a key of the kind "slots/NAME", with a number from
// 0 to N-1 that no other holder has at the same time. No count is kept that could be wrong: the slot of a
// crashed process is free once its session has expired.
//
// Within a process, calls get slots in the order in which they came. Between processes, the order is random.
//
// All methods are safe for concurrent use.
type Slots struct {
	keys    *Keys
	claimer *claimer
	turn    chan struct{} // held by the call that waits for a slot; the others wait behind it
	n       int
	freed   atomic.Int64 // when this process last freed a slot
}

// NewSlots returns n slots of a name, at least 1 and at most 1,000. A session has at most one Slots for each
// name. If processes use different numbers, as during a deployment, they hold at most the greatest of these together. A
// slot whose number is n or greater is not taken again here once it is free; [Slots.RequestRelease] frees it sooner.
// NewSlots does no I/O.
func NewSlots(s *Session, name string, n int) (*Slots, error) {
	slots, err := newSlots(s, name, n)
	return slots, opError("new slots", err)
}

func newSlots(s *Session, name string, n int) (*Slots, error) {
	switch {
	case name == "":
		return nil, fmt.Errorf("%w: the name of the slots is empty", tenure.ErrInvalid)
	case n < 1 || n > mostSlots:
		return nil, fmt.Errorf("%w: %d slots, of which there must be 1 to %d", tenure.ErrInvalid, n, mostSlots)
	}
	keys, err := newKeys(s, "slots/"+name)
	if err != nil {
		return nil, err
	}
	slots := &Slots{keys: keys, turn: make(chan struct{}, 1), n: n}
	slots.claimer = &claimer{
		k: keys.kind, poll: s.cfg.PollInterval, one: true, keep: keys.claimer.keep,
		send: func(ctx context.Context, l *ledger, free, gone, missing []string) ([]objects.Claim, error) {
			if len(free) == 0 {
				return s.claims.Take(ctx, l.term.id, keys.name, nil, nil, missing[:1], s.limit)
			}
			return s.claims.TakeOne(ctx, l.term.id, keys.name, free, gone, s.limit)
		},
	}
	return slots, nil
}

// ids returns the keys of all slots.
func (s *Slots) ids() []string {
	ids := make([]string, s.n)
	for i := range ids {
		ids[i] = strconv.Itoa(i)
	}
	return ids
}

// Number returns the number of the slot of a claim.
func (s *Slots) Number(c Claim) int {
	n, _ := strconv.Atoi(c.Key.ID)
	return n
}

// Take waits for a slot and takes the one whose last claim began longest ago, so that no number is used again
// sooner than necessary. While there is no session, Take waits for one; [ErrClosed] reports that there will be
// none. Errors of the store do not end it, except [tenure.ErrSetup]. If a slot was taken before ctx was done,
// Take returns it without an error.
func (s *Slots) Take(ctx context.Context) (Claim, error) {
	c, err := s.wait(ctx)
	return c, opError("take "+s.keys.name, err)
}

func (s *Slots) wait(ctx context.Context) (Claim, error) {
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return Claim{}, context.Cause(ctx)
	}
	// Other processes hear of a freed slot about a millisecond later, and follow the hint within mostSpread.
	if freed := time.UnixMicro(s.freed.Load()); time.Since(freed) < mostSpread {
		pace.Sleep(ctx, rand.N(2*mostSpread))
	}
	got, err := s.claimer.wait(ctx, s.ids)
	if len(got) == 0 {
		return Claim{}, err
	}
	return got[0], nil
}

// Do calls fn with a context that ends when the claim does, and frees the slot when fn has returned, as
// [Keys.Do] does.
func (s *Slots) Do(ctx context.Context, c Claim, fn func(context.Context) error) error {
	defer s.noteFreed()
	return s.keys.Do(ctx, c, fn)
}

// Release frees slots, as [Keys.Release] does.
func (s *Slots) Release(ctx context.Context, claims ...Claim) error {
	defer s.noteFreed()
	return s.keys.Release(ctx, claims...)
}

func (s *Slots) noteFreed() { s.freed.Store(time.Now().UnixMicro()) }

// RequestRelease asks the holders of slots to release them, as [Keys.RequestRelease] does.
func (s *Slots) RequestRelease(ctx context.Context, numbers ...int) error {
	ids := make([]string, len(numbers))
	for i, n := range numbers {
		ids[i] = strconv.Itoa(n)
	}
	return s.keys.RequestRelease(ctx, ids...)
}

// Holds reports whether this session holds the claim and may rely on it, see [tenure.Term.Valid]. It does
// no I/O.
func (s *Slots) Holds(c Claim) bool { return s.keys.Holds(c) }
