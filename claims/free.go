package claims

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// free starts to free rows, unless their session is lost. Rows of concurrent calls share statements. unused
// says that their attempts are taken back. The caller holds the session's mu. If the term is over, one of its
// calls or goroutines must still be busy.
func (k *kind) free(l *ledger, unused bool, rows ...objects.Claim) (batches []*batch) {
	batches = l.startFreeing(unused, k.queue != nil && k.queue.cfg.Attempts != "", rows)
	if len(rows) > 0 && !l.freesRows {
		l.freesRows = true
		l.term.busy.Go(func() { k.freeBatches(l) })
	}
	return batches
}

// freeBatches frees batches until there are none.
func (k *kind) freeBatches(l *ledger) {
	runtime.Gosched() // so that funcs that return at the same moment share a statement
	var hinted time.Time
	for {
		k.s.mu.Lock()
		b := l.nextBatch()
		l.freesRows = b != nil
		k.s.mu.Unlock()
		if b == nil {
			return
		}
		rows, offered := b.rows, offer{}
		if b.asks {
			offered = k.offer(l, rows)
			rows = objects.Subtract(rows, offered.rows)
		}
		locked := k.freeBatch(l, rows, b.how)
		k.s.mu.Lock()
		l.freed(objects.Subtract(rows, locked))
		k.s.noteGivenBack()
		last := len(l.toFree) == 0
		k.s.mu.Unlock()
		if len(locked) == 0 && len(offered.rows) == 0 {
			close(b.done)
		} else { // a fenced write has locked them, and may hang: the other rows don't wait for it
			l.term.busy.Go(func() { k.freeLater(l, b, locked, offered) })
		}
		if last || time.Since(hinted) > coalesce {
			l.term.busy.Go(func() { k.s.wake(keyOf(k.name)) }) // while the next batch is freed
			hinted = time.Now()
		}
	}
}

// freeLater frees the locked rows of a batch once no other transaction locks them, and the offered ones once nobody can
// take them any more.
func (k *kind) freeLater(l *ledger, b *batch, locked []objects.Claim, offered offer) {
	k.awaitTaken(l, offered.rows)
	left := slices.Concat(locked, offered.rows)
	for rows, tries := left, 0; len(rows) > 0 && awaitUnlocked(l.term.ctx, tries); tries++ {
		rows = k.freeBatch(l, rows, b.how)
	}
	k.s.mu.Lock()
	l.freed(left)
	k.s.noteGivenBack()
	k.s.mu.Unlock()
	close(b.done)
	k.s.wake(keyOf(k.name))
	k.withdraw(l, offered.wishes)
}

// freeBatch frees rows, and returns the ones that another transaction has locked. It retries until it has
// an answer, because no other session frees them while this one lives. If the database refuses to free a
// row, reconcile tries again later.
func (k *kind) freeBatch(l *ledger, rows []objects.Claim, how objects.Freeing) (locked []objects.Claim) {
	t := l.term
	for failures := 0; t.ctx.Err() == nil; failures++ {
		locked, refused, err := k.s.free(t.ctx, k.table, t.id, k.name, rows, how)
		if err == nil {
			if len(refused) > 0 {
				k.s.mu.Lock()
				k.doubt(l, k.s.cfg.TTL, k.s.cfg.TTL)
				k.s.mu.Unlock()
			}
			return locked
		}
		k.s.retries.Log(k.s.cfg.Logger, slog.LevelWarn, "failed to free keys; retrying", err, "kind", k.name)
		pace.Sleep(t.ctx, pace.Retry(k.s.cfg.RenewInterval, longestRetryPause, failures))
	}
	return nil
}

// reclaim frees rows that name the session although it has no use for them, and returns the keys that are free
// now. They get new tokens when they are taken, because the old ones may have been used. The caller has
// the turn.
func (k *kind) reclaim(l *ledger, rows []objects.Claim) (free []string, err error) {
	if len(rows) == 0 {
		return nil, nil
	}
	alike := make(map[objects.Freeing][]objects.Claim)
	k.s.mu.Lock()
	for _, r := range rows {
		k.doubt(l, k.s.cfg.TTL, k.s.cfg.TTL)               // in case it can't be freed now: it may be locked
		how := objects.Freeing{Unused: r.Token > l.newest} // otherwise the claim may have been given to a caller
		alike[how] = append(alike[how], r)
	}
	k.s.mu.Unlock()
	for how, rows := range alike {
		locked, refused, err := k.s.free(l.term.ctx, k.table, l.term.id, k.name, rows, how)
		if err != nil {
			return nil, err
		}
		free = append(free, idsOf(objects.Subtract(rows, append(locked, refused...)))...)
	}
	return free, nil
}

// howToFree returns how a row is freed when the session closes. Its attempt may be spent under another name of its
// table.
func (s *Session) howToFree(r objects.Claim) objects.Freeing {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.kinds {
		if k.ledger != nil && k.ledger.spent[r.ID] == r.Token {
			return objects.Freeing{}
		}
	}
	return objects.Freeing{Unused: true}
}

// freeAll frees all rows that name a session, except those to skip, when the session closes.
func (s *Session) freeAll(ctx context.Context, id string, skip func(objects.Claim) bool) (err error) {
	for _, table := range s.tables() { // if one fails, the others are freed all the same
		_, failed := s.freeRows(ctx, table, id, 2, skip, s.howToFree)
		err = cmp.Or(err, failed)
	}
	return err
}

// freeRows frees the rows of one table that name a session, except those to skip, and returns their number. Up
// to atOnce statements free rows while another reads the next ones, so that the database and this process work
// at the same time. Callers that wait for such rows are woken after the first ones, now and then, and when all
// are free. Several goroutines call skip and how.
func (s *Session) freeRows(ctx context.Context, table *ownerTable, id string, atOnce int, skip func(objects.Claim) bool, how func(objects.Claim) objects.Freeing) (freed int, err error) {
	var (
		pages   = make(chan page)
		frees   sync.WaitGroup
		mu      sync.Mutex // guards byKind and err
		byKind  = make(map[string]int)
		stopped = make(chan struct{})
		stop    = sync.OnceFunc(func() { close(stopped) })
	)
	done := func(freed map[string]int, failed error) {
		mu.Lock()
		defer mu.Unlock()
		for kind, n := range freed {
			byKind[kind] += n
		}
		if err == nil && failed != nil {
			err = failed
			stop()
		}
	}
	for range atOnce {
		frees.Go(func() {
			for p := range pages {
				done(s.freePage(ctx, table, id, p, skip, how))
			}
		})
	}
	done(nil, s.readPages(ctx, table, id, pages, stopped))
	close(pages)
	frees.Wait()
	for kind, n := range byKind { // not with the last page, which may be free before an earlier one
		freed += n
		s.wake(keyOf(kind))
	}
	return freed, err
}

// freeAtMost is the number of sessions whose rows in one table are freed at the same time, with one statement
// each, so that connections remain for claims.
const freeAtMost = 2

// namedRows are the rows of a table that name a session.
type namedRows struct {
	table   *ownerTable
	session string
}

// free frees the rows of a session that is gone. Each table has its own goroutine, so that neither the
// next session to expire nor the other tables have to wait.
func (w *sweeper) free(ctx context.Context, id string, tables ...*ownerTable) {
	for _, table := range tables {
		if _, frees := w.freeing.LoadOrStore(namedRows{table, id}, true); !frees {
			w.frees.Go(func() { w.freeRows(ctx, namedRows{table, id}) })
		}
	}
}

func (w *sweeper) freeRows(ctx context.Context, of namedRows) {
	defer w.freeing.Delete(of)
	slots, _ := w.slots.LoadOrStore(of.table, make(chan struct{}, freeAtMost))
	select {
	case slots.(chan struct{}) <- struct{}{}:
		defer func() { <-slots.(chan struct{}) }()
	case <-ctx.Done():
		return
	}
	ctx = objects.WithoutSync(ctx) // if a crash undoes this, a later sweep finds the rows
	for failures := 0; ; failures++ {
		freed, err := w.s.freeRows(ctx, of.table, of.session, 1, nil, func(objects.Claim) objects.Freeing { return objects.Freeing{Lost: true} })
		w.freed.Add(int64(freed))
		if err == nil {
			return
		}
		const most = 4 // within a RenewInterval; then the rows of other sessions have the slot
		if failures == most {
			w.logFailure(ctx, "failed to free the rows of a session that is gone; retrying within a TTL", err)
			return
		}
		w.logFailure(ctx, "failed to free the rows of a session that is gone; retrying", err)
		if !pace.Sleep(ctx, pace.Retry(w.s.cfg.RenewInterval, longestRetryPause, failures)) {
			return
		}
	}
}

// page is a part of the rows that name a session.
type page struct {
	rows []objects.Claim
	hint bool // callers that wait for such rows are woken once these are free
}

// readPages reads the rows of a table that name a session until there are no more, or until stopped is closed.
func (s *Session) readPages(ctx context.Context, table *ownerTable, id string, pages chan<- page, stopped <-chan struct{}) error {
	most := 20 // at first, so that some are free at once, however many there are
	var last objects.Claim
	var hinted time.Time
	for {
		var rows []objects.Claim
		n, err := table.groups.page(ctx, most, func(n int) (err error) {
			rows, err = table.rows.Owned(ctx, id, last.Kind, last.ID, n, s.limit)
			return err
		})
		if err != nil || len(rows) == 0 {
			return err
		}
		last, most = rows[len(rows)-1], 2*n
		p := page{rows: rows, hint: len(rows) == n && time.Since(hinted) > coalesce}
		if p.hint {
			hinted = time.Now()
		}
		select {
		case pages <- p:
		case <-stopped:
			return nil
		}
	}
}

// freePage frees the rows of a page, and returns how many of each kind.
func (s *Session) freePage(ctx context.Context, table *ownerTable, id string, p page, skip func(objects.Claim) bool, how func(objects.Claim) objects.Freeing) (freed map[string]int, err error) {
	type alike struct {
		kind string
		how  objects.Freeing
	}
	freed, freedAlike := make(map[string]int), make(map[alike][]objects.Claim)
	for _, r := range p.rows {
		if skip == nil || !skip(r) {
			of := alike{r.Kind, how(r)}
			freedAlike[of] = append(freedAlike[of], r)
		}
	}
	for of, rows := range freedAlike {
		locked, refused, err := s.free(ctx, table, id, of.kind, rows, of.how)
		if err != nil {
			return freed, err
		}
		freed[of.kind] += len(rows) - len(locked) - len(refused)
		if p.hint {
			s.wake(keyOf(of.kind))
		}
	}
	return freed, nil
}

// free frees rows of a session. It returns the ones that another transaction has locked, and the ones
// that the database refuses to have freed.
func (s *Session) free(ctx context.Context, table *ownerTable, id, kind string, rows []objects.Claim, how objects.Freeing) (locked, refused []objects.Claim, err error) {
	var why error
	err = inGroups(table.groups, rows, func(rows []objects.Claim) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		freeing, cancel := s.writeContext(ctx)
		defer cancel()
		more, err := table.rows.Free(freeing, id, kind, idsOf(rows), tokensOf(rows), how, s.limit)
		locked = append(locked, more...)
		if errors.Is(err, context.DeadlineExceeded) { // freeing a claim twice does no harm
			return &objects.TooSlow{Cause: err}
		}
		return err
	}, func(row objects.Claim, err error) {
		refused, why = append(refused, row), err
	})
	if len(refused) > 0 { // one line, however many there are
		s.cfg.Logger.Warn("the database refuses to free a key; retrying within a TTL", "session", id, "kind", kind, "key", refused[0].ID, "keys", len(refused), "error", why)
	}
	return locked, refused, err
}

// windDown returns when no func runs under a term any more, and the term's rows are free. If the session is
// lost, other sessions free the rows.
func (s *Session) windDown(ctx context.Context, t *term) {
	for _, k := range s.allKinds() { // wait for statements that may still take rows
		k.turn <- struct{}{}
		<-k.turn
	}
	idle := make(chan struct{})
	go func() {
		t.busy.Wait()
		close(idle)
	}()
	for failures := 0; ctx.Err() == nil; failures++ {
		// If another process has resumed the session, see [tenure.Lease.Resume], Seal fails, and the rows
		// are that process's.
		sealing, cancel := s.writeContext(ctx)
		err := t.lease.Seal(sealing, t.Term)
		cancel()
		if err == nil {
			err = s.freeAll(ctx, t.id, s.isBusy)
		}
		if err == nil {
			break
		}
		const often = 10
		if errors.Is(err, tenure.ErrConflict) && failures < often { // a renewal came first
			continue
		}
		s.cfg.Logger.Warn("failed to free keys at the end of a session; retrying", "session", t.id, "error", err)
		select {
		case <-idle: // deleting the record is enough now
			return
		case <-ctx.Done():
		case <-time.After(pace.Retry(s.cfg.RenewInterval, longestRetryPause, failures)):
		}
	}
	<-idle
	if ctx.Err() == nil {
		_ = s.freeAll(ctx, t.id, nil) // rows of a statement whose answer was lost
	}
}

// isBusy reports whether a func runs for a row, or the row is already being freed, or stands for an offer. The func may run for the row
// under another name of its table.
func (s *Session) isBusy(r objects.Claim) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isOffer(r) {
		return true
	}
	for _, other := range s.kinds {
		if other.running[r.ID].isFor(r.Session, r.Token) {
			return true
		}
	}
	k := s.kinds[r.Kind]
	return k != nil && (k.running[r.ID] != nil || k.ledger != nil && k.ledger.freeing[r.ID] > 0)
}

// sessionsKey is the key that is woken when a session begins.
var sessionsKey = tenure.Key{Type: "tenure.claims", ID: "*"}

// keyOf returns the key that is woken when keys of a kind are freed.
func keyOf(kind string) tenure.Key { return tenure.Key{Type: "tenure.claims", ID: "kind " + kind} }

// wake wakes all watchers of a key. It ignores errors, because a hint may be lost in any case.
func (s *Session) wake(key tenure.Key) { wake(s.store, key, s.limit) }

func wake(store tenure.Store, key tenure.Key, limit time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	_ = tenure.Wake(ctx, store, key)
}

// watch subscribes to the hints that wake sends.
func (s *Session) watch(key tenure.Key) tenure.Subscription { return tenure.Watch(s.store, key) }
