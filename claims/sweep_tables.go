package claims

import (
	"context"
	"maps"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/record"
)

// look is which sessions the rows of a table name.
type look struct {
	table           *ownerTable
	regular         bool // at a random moment
	asked, answered time.Time
	sessions        []objects.Session
	err             error
}

// look looks at a table.
func (w *sweeper) look(ctx context.Context, table *ownerTable, regular bool) look {
	l := look{table: table, regular: regular, asked: time.Now()}
	l.sessions, l.err = table.rows.Sessions(ctx, w.s.limit)
	l.answered = time.Now()
	return l
}

// lookBeside looks at a table of the user in a goroutine, so that one that is locked or slow delays
// neither the others nor the judging of sessions. As long as that goes on, it does not look again.
func (w *sweeper) lookBeside(ctx context.Context, table *ownerTable, regular bool) {
	if w.looking[table] {
		return
	}
	w.looking[table] = true
	w.frees.Go(func() {
		l := w.look(ctx, table, regular)
		select {
		case w.looked <- l:
		case <-ctx.Done():
		}
	})
}

// take judges the sessions that rows of a table name. It removes those that have expired, and frees
// their rows. Those of a session that is gone already it frees only if the look was at a random
// moment: all that wait look at the same moment, and one of them has removed the session. A session
// that is missing in one snapshot stays missing, so each look is judged by itself.
func (w *sweeper) take(ctx context.Context, l look) {
	s := w.s
	rows := l.table != s.table
	if rows {
		delete(w.looking, l.table)
	}
	if l.err != nil {
		if delete(w.named, l.table); rows {
			w.failed(ctx, "failed to look at rows of the table; retrying within a TTL", l.err)
		} else {
			w.failed(ctx, "failed to look at sessions; retrying", l.err)
		}
		return
	}
	own, named := s.ID(), make(map[string]bool, len(l.sessions))
	for _, session := range l.sessions {
		named[session.ID] = true
	}
	w.named[l.table] = named
	w.know()
	if rows {
		w.compare(l, false)
	}
	for _, session := range l.sessions {
		if session.Wanted && session.ID == own {
			s.recheckRequests(own)
		}
		switch r := session.Record; {
		case r == nil && (l.regular || rows && w.orphaned(session.ID, l.asked)):
			w.free(ctx, session.ID, l.table)
		case r != nil && session.ID != own:
			w.judge(ctx, session.ID, record.Object{
				Labels: objects.DecodeLabels(r.Labels), Payload: r.Payload, Version: r.Version, UpdatedAt: objects.Stamp(r.Updated), Age: r.Age,
			}, l.asked, l.answered)
		}
	}
}

// know notes which sessions the last looks have seen.
func (w *sweeper) know() {
	known := make(map[string]bool)
	for _, named := range w.named {
		maps.Copy(known, named)
	}
	w.known.Store(&known)
	maps.DeleteFunc(w.orphans, func(id string, _ time.Time) bool { return !known[id] })
}

// namedRows are the rows of a table that name a session.
type namedRows struct {
	table   *ownerTable
	session string
}

// free frees the rows of a session that is gone, of each table in a goroutine, so that neither the
// next session to expire nor the other tables need wait.
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
	ctx = objects.WithoutSync(ctx) // rows that a crash gives back to the session are found by a later sweep
	for failures := 0; ; failures++ {
		freed, err := w.s.freeRows(ctx, of.table, of.session, nil)
		w.freed.Add(int64(freed))
		if err == nil {
			return
		}
		const most = 4 // within a RenewInterval; then other sessions may use the slot
		if failures == most {
			w.failed(ctx, "failed to free the rows of a session that is gone; retrying within a TTL", err)
			return
		}
		w.failed(ctx, "failed to free the rows of a session that is gone; retrying", err)
		if !pace.Sleep(ctx, pace.Retry(w.s.cfg.RenewInterval, longestRetryPause, failures)) {
			return
		}
	}
}
