package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/reach"
)

// Claim is the right of a session to one key. It is a value, which may be kept as JSON or sent
// to another process. A session that passes a claim on stops using it, see [Keys.PassOn].
type Claim struct {
	Key     tenure.Key `json:"key"` // its Type is the kind
	Session string     `json:"session"`
	Token   int64      `json:"token"` // of two claims of one key, the later always has the greater one

	// Attempt says how often the row has been taken, if [RowsConfig.Attempts] counts that.
	Attempt int `json:"attempt,omitempty"`
}

func (c Claim) String() string { return c.Key.String() }

func (c Claim) row() objects.Claim {
	return objects.Claim{Kind: c.Key.Type, ID: c.Key.ID, Session: c.Session, Token: c.Token}
}

// Keys are the claims of a session on the keys of one kind. All methods are safe for
// concurrent use.
type Keys struct {
	s      *Session
	kind   string
	turn   chan struct{} // held by the call that claims, so there is one such statement at a time
	table  naming        // that has the rows
	groups *groups       // of that table's statements
	lookUp lookUp        // reads its rows

	// The session's mu guards the fields below.
	now     *holdings        // nil before the first term
	running map[string]*call // the funcs of Do, also those of terms that were lost
	strays  map[string]bool  // of rows: those of running whose claim has ended
}

// holdings are the claims of one kind under one term. The session's mu guards all fields.
type holdings struct {
	term    *term
	tokens  map[string]int64 // of the claims that are held
	freeing map[string]int   // how many claims of a key are being freed: a freed one may have been taken again before the answer
	toFree  []*batch         // those that are not being freed yet
	frees   bool             // a goroutine frees batches
	asked   map[string]bool  // claims that somebody else asks for
	early   map[string]int64 // the tokens of those of which the session did not know then
	doubts
	changes int   // how often a claim has begun or ended
	newest  int64 // the greatest token that was given

	passedOn map[string]int64 // the tokens of claims that were passed on
	forgetAt int              // how many of them there are when it is time to forget those that have ended
}

// call is one call of Do.
type call struct {
	of     *holdings
	token  int64
	cancel context.CancelCauseFunc
	kept   bool          // of a row: it is not freed when the func returns, or is free already
	freed  chan struct{} // closed when the func has returned and its key is free
}

// batch is some rows that one statement frees.
type batch struct {
	rows []objects.Claim
	done chan struct{} // closed when the rows are free, or the session is lost
}

// NewKeys returns the keys of a kind. A session has at most one for each kind. It does no I/O.
func NewKeys(s *Session, kind string) (*Keys, error) {
	switch {
	case s == nil:
		return nil, fmt.Errorf("tenure: new keys: %w: session is nil", tenure.ErrInvalid)
	case kind == "":
		return nil, fmt.Errorf("tenure: new keys: %w: the kind is empty", tenure.ErrInvalid)
	}
	err := objects.ValidText("kind", kind)
	if err == nil {
		err = s.fits(kind)
	}
	if err != nil {
		return nil, fmt.Errorf("tenure: new keys: %w", err)
	}
	k, err := newKeys(s, kind, s.table, &s.groups, func(ctx context.Context, ids []string) ([]objects.Claim, error) {
		return s.table.Look(ctx, kind, ids, s.limit)
	})
	if err != nil {
		return nil, fmt.Errorf("tenure: new keys: %w", err)
	}
	return k, nil
}

// lookUp returns those of some rows that exist.
type lookUp func(ctx context.Context, ids []string) ([]objects.Claim, error)

func newKeys(s *Session, kind string, table naming, groups *groups, lookUp lookUp) (*Keys, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.kinds[kind] != nil {
		return nil, fmt.Errorf("%w: the session has keys of kind %q, or rows of that table, already", tenure.ErrInvalid, kind)
	}
	k := &Keys{s: s, kind: kind, table: table, groups: groups, lookUp: lookUp, turn: make(chan struct{}, 1), running: make(map[string]*call), strays: make(map[string]bool)}
	s.kinds[kind] = k
	if s.term != nil {
		k.enter(s.term)
	}
	return k, nil
}

func init() {
	reach.FitKeys = func(session any, kind string, ids []string) error { return session.(*Session).fits(kind, ids...) }
	reach.DropKeys = func(keys any) {
		k := keys.(*Keys)
		k.s.mu.Lock()
		defer k.s.mu.Unlock()
		delete(k.s.kinds, k.kind)
	}
}

// enter begins to claim under a term. The caller holds the mutex.
func (k *Keys) enter(t *term) {
	for id := range k.running {
		k.strays[id] = true
	}
	k.now = &holdings{
		term: t, tokens: make(map[string]int64), freeing: make(map[string]int), asked: make(map[string]bool),
		early: make(map[string]int64), doubts: newDoubts(), passedOn: make(map[string]int64), forgetAt: perStatement,
	}
}

// stop tells the funcs that run under a term to return. The caller holds the mutex.
func (k *Keys) stop(t *term, cause error) {
	for _, call := range k.running {
		if call.of.term == t {
			call.cancel(cause)
		}
	}
}

// Claim claims those of the keys that are free, a thousand in a statement, and returns its
// claims, in no order. A key that this session has already is not free. Claim waits while there
// is no session; [ErrClosed] says that there will be none.
//
// A statement that was sent is waited for even if ctx is done: beside an error, Claim may
// return claims, which the caller owns nevertheless. So it does if a constraint or a trigger of
// the table refuses a key. No keys, a key twice, or one that is not valid text is
// [tenure.ErrInvalid], and then nothing is claimed. So is a key on Postgres that has more than
// 2,600 bytes together with its kind.
func (k *Keys) Claim(ctx context.Context, ids ...string) ([]Claim, error) {
	if err := k.valid(ids); err != nil {
		return nil, fmt.Errorf("tenure: claim %s: %w", k.kind, err)
	}
	got, _, err := k.claim(ctx, ids)
	if err != nil {
		err = fmt.Errorf("tenure: claim %s: %w", k.kind, err)
	}
	return got, err
}

// valid rejects keys that can't be claimed.
func (k *Keys) valid(ids []string) error {
	if err := validIDs(ids); err != nil {
		return err
	}
	return k.s.fits(k.kind, ids...)
}

// fits rejects keys that are too long for the database.
func (s *Session) fits(kind string, ids ...string) error {
	most := s.table.LongestKey()
	for _, id := range append([]string{""}, ids...) {
		if n := len(kind) + len(id); most > 0 && n > most {
			return fmt.Errorf("%w: key %q of kind %q has %d bytes together with its kind: the database's indexes allow %d (use a hash of it)",
				tenure.ErrInvalid, shortened(id), shortened(kind), n, most)
		}
	}
	return nil
}

// shortened returns the beginning of a text that may be long.
func shortened(s string) string {
	const most = 50
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

func validIDs(ids []string) error {
	if len(ids) == 0 {
		return fmt.Errorf("%w: no keys are given", tenure.ErrInvalid)
	}
	seen := make(map[string]bool, len(ids))
	for _, id := range ids {
		switch err := objects.ValidText("key", id); {
		case err != nil:
			return err
		case id == "":
			return fmt.Errorf("%w: a key is empty", tenure.ErrInvalid)
		case seen[id]:
			return fmt.Errorf("%w: the key %q is given twice", tenure.ErrInvalid, id)
		}
		seen[id] = true
	}
	return nil
}

// claim also reports whether somebody has locked a row that was free when it was read.
func (k *Keys) claim(ctx context.Context, ids []string) (got []Claim, locked bool, err error) {
	if err := k.s.await(ctx); err != nil {
		return nil, false, err
	}
	select {
	case k.turn <- struct{}{}:
		defer func() { <-k.turn }()
	case <-ctx.Done():
		return nil, false, context.Cause(ctx)
	}
	k.s.mu.Lock()
	h := k.now
	k.s.mu.Unlock()
	var refused error
	for some := range slices.Chunk(ids, perStatement) {
		if ctx.Err() != nil {
			return got, locked, context.Cause(ctx)
		}
		rows, left, err := k.take(ctx, h, some)
		kept, over := k.keep(h, rows)
		if over != nil { // then none of this term is valid
			return nil, locked, cmp.Or(err, over)
		}
		got, locked = append(got, kept...), locked || left
		switch {
		case isRefused(err):
			refused = cmp.Or(refused, err)
		case err != nil:
			return got, locked, err
		}
	}
	return got, locked, refused
}

// take makes the term the owner of those rows that it may take. They are read before they are
// written, and not in the same statement: see [objects.Claim].
func (k *Keys) take(ctx context.Context, h *holdings, ids []string) (taken []objects.Claim, locked bool, err error) {
	ids, err = k.wanted(h, ids)
	if err != nil || len(ids) == 0 {
		return nil, false, err
	}
	rows, err := k.look(ctx, ids)
	if err != nil {
		return nil, false, err
	}
	var free, gone []string
	var unknown []objects.Claim
	known := make(map[string]bool, len(rows))
	for _, r := range rows {
		known[r.ID] = true
		switch {
		case r.Session == h.term.id:
			unknown = append(unknown, r)
		case r.Gone:
			gone = append(gone, r.Session)
			free = append(free, r.ID)
		case r.Session == "":
			free = append(free, r.ID)
		default:
			k.s.sweeper.meets(r.Session)
		}
	}
	missing := slices.DeleteFunc(ids, func(id string) bool { return known[id] })
	more, err := k.reclaim(h, unknown)
	if free = append(free, more...); err != nil || len(free) == 0 && len(missing) == 0 {
		return nil, false, err
	}
	slices.Sort(gone)
	rows, err = k.write(ctx, h, free, slices.Compact(gone), missing)
	return rows, err == nil && len(rows) < len(free)+len(missing), err
}

// reclaim frees those of the rows that name the session and are unknown, and returns which are free
// now. They get new tokens when they are taken, because the old ones may have been used. The caller
// has the turn.
func (k *Keys) reclaim(h *holdings, rows []objects.Claim) (free []string, err error) {
	if len(rows) == 0 {
		return nil, nil
	}
	k.s.mu.Lock()
	rows = slices.DeleteFunc(rows, func(r objects.Claim) bool { return k.knows(h, r) })
	for _, r := range rows {
		k.doubt(h, doubt{until: time.Now()}, r.ID) // it may be locked, for example
	}
	k.s.mu.Unlock()
	locked, refused, err := k.s.free(h.term.ctx, k.table, h.term.id, k.kind, rows)
	if err != nil {
		return nil, err
	}
	return idsOf(objects.Without(rows, append(locked, refused...))), nil
}

// look returns those of the rows that exist.
func (k *Keys) look(ctx context.Context, ids []string) (rows []objects.Claim, err error) {
	err = inGroups(k.groups, ids, func(ids []string) error {
		some, err := k.lookUp(ctx, ids)
		rows = append(rows, some...)
		return err
	}, nil)
	return rows, err
}

// write sends the statement of take. If the database refuses rows, it takes the others, and
// returns why besides.
func (k *Keys) write(ctx context.Context, h *holdings, free, gone, missing []string) (rows []objects.Claim, err error) {
	isMissing := make(map[string]bool, len(missing))
	for _, id := range missing {
		isMissing[id] = true
	}
	var refused error
	err = inGroups(k.groups, slices.Concat(free, missing), func(ids []string) error {
		if _, err := k.wanted(h, nil); err != nil { // the statements before this one took long
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		sending, cancel := k.s.uncut(ctx)
		defer cancel()
		var free, missing []string
		for _, id := range ids {
			if isMissing[id] {
				missing = append(missing, id)
			} else {
				free = append(free, id)
			}
		}
		taken, err := k.s.table.Take(sending, h.term.id, k.kind, free, gone, missing, k.s.limit)
		if err != nil && !wroteNothing(err) {
			if sending.Err() != nil { // the next time it may be fast enough
				k.groups.tooSlow(len(ids))
			}
			k.lostAnswer(h, ids...)
		}
		rows = append(rows, taken...)
		return err
	}, func(id string, err error) {
		refused = cmp.Or(refused, fmt.Errorf("the database refuses the key %q: %w", id, err))
	})
	return rows, cmp.Or(err, refused)
}

// wanted returns those of the keys that the session may claim, none after its end: the rows would
// name a session that is gone. It runs no key twice: one whose func still runs, for a session
// that was lost, is not for it.
func (k *Keys) wanted(h *holdings, ids []string) (wanted []string, err error) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if err := k.s.over(h.term); err != nil {
		return nil, err
	}
	for _, id := range ids {
		if _, held := h.tokens[id]; !held && h.freeing[id] == 0 && k.running[id] == nil {
			wanted = append(wanted, id)
		}
	}
	return wanted, nil
}

// keep makes claims of rows that were taken. An answer that comes after the trust in the
// session has ended counts as a refusal.
func (k *Keys) keep(h *holdings, rows []objects.Claim) (kept []Claim, err error) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if err := k.s.over(h.term); err != nil {
		return nil, err
	}
	kept = make([]Claim, 0, len(rows))
	for _, r := range rows {
		h.tokens[r.ID] = r.Token
		h.changes++
		h.newest = max(h.newest, r.Token)
		delete(h.passedOn, r.ID)
		if h.early[r.ID] == r.Token {
			delete(h.early, r.ID)
			h.term.heedAgain()
		}
		kept = append(kept, Claim{Key: tenure.Key{Type: k.kind, ID: r.ID}, Session: h.term.id, Token: r.Token})
	}
	return kept, nil
}

// Wait is [Keys.Claim], except that it waits until it gets at least one of the keys. Errors of
// the store do not end it, except [tenure.ErrSetup]. It waits for keys that this session has
// itself, or has passed on, as for any others: until they are released. A caller that is the one
// to release them waits until ctx is done.
func (k *Keys) Wait(ctx context.Context, ids ...string) ([]Claim, error) {
	if err := k.valid(ids); err != nil {
		return nil, fmt.Errorf("tenure: wait for %s: %w", k.kind, err)
	}
	hints := k.s.hints(keyOf(k.kind)) // before the first look, so that no hint is missed
	defer hints.Stop()
	defer k.s.sweeper.waits()()
	var spurious pace.Limiter
	flood := coalesce * time.Duration(1+len(ids)/perStatement) // hints may be about others
	for woken, tries := false, 0; ; {
		got, locked, err := k.claim(ctx, ids)
		switch {
		case len(got) > 0:
			return got, nil
		case ctx.Err() != nil:
			err = context.Cause(ctx)
			fallthrough
		case errors.Is(err, ErrClosed), errors.Is(err, tenure.ErrSetup):
			return nil, fmt.Errorf("tenure: wait for %s: %w", k.kind, err)
		case err != nil:
			k.s.retries.Log(k.s.cfg.Logger, slog.LevelWarn, "keys are not claimed, trying again", err, "kind", k.kind)
		}
		longest := pace.Jitter(k.s.cfg.PollInterval)
		if hints.Live() && err == nil {
			longest = k.s.cfg.TTL
		}
		if locked { // by a write that is about to commit, and that wakes nobody
			longest = min(k.s.cfg.PollInterval, 10*time.Millisecond<<min(tries, 10))
			tries++
		}
		woken, _ = pace.Await(ctx, hints.C(), spurious.IgnoreFor(woken, min(flood, k.s.cfg.PollInterval)), longest)
	}
}

// Owner returns who owns a key: the holder of its session, with the labels, so that a request
// can be sent there. It returns [tenure.ErrNotFound] if nobody does. A process that has crashed
// is returned until its session has expired and was buried. This process need not have a
// session.
func (k *Keys) Owner(ctx context.Context, id string) (tenure.Holding, error) {
	holding, err := k.owner(ctx, id)
	if err != nil {
		return tenure.Holding{}, fmt.Errorf("tenure: owner of %s/%s: %w", k.kind, id, err)
	}
	return holding, nil
}

func (k *Keys) owner(ctx context.Context, id string) (tenure.Holding, error) {
	if err := validIDs([]string{id}); err != nil {
		return tenure.Holding{}, err
	}
	rows, err := k.s.table.Look(ctx, k.kind, []string{id}, k.s.limit)
	if err != nil {
		return tenure.Holding{}, err
	}
	if len(rows) == 0 || rows[0].Session == "" || rows[0].Gone {
		return tenure.Holding{}, tenure.ErrNotFound
	}
	lease, err := tenure.NewLease(k.s.store, tenure.LeaseConfig{Key: tenure.Key{Type: objects.SessionType, ID: rows[0].Session}, Logger: k.s.cfg.Logger})
	if err != nil {
		return tenure.Holding{}, err
	}
	return lease.Read(ctx)
}
