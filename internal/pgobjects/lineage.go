package pgobjects

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
)

// The lineage of a table is the history that one primary continues. A promotion or a restore begins a
// new lineage, which may lack the last acknowledged writes. The table is marked once in each lineage,
// with an object whose age says how long ago the first replica reached this primary.
//
// What is known about a lineage holds for one start of one server: a standby keeps its connections
// when it is promoted, and a pooler moves them.

// lineageID is the ID of the object that marks a table.
var lineageID = objects.ID{Type: objects.LineageType, ID: objects.LineageType}

// lineageMark is its payload.
type lineageMark struct {
	Lineage string `json:"lineage"`
	Start   string `json:"start"` // of the server that was marked
	Nonce   string `json:"nonce"`
	Settled bool   `json:"settled,omitempty"` // nothing can have been lost before
}

// lineages remembers the lineage in which a table was last seen.
type lineages struct {
	seen    atomic.Pointer[seenLineage] // nil: look again
	looking chan struct{}               // of size 1: one call looks, and the others use what it finds
	told    atomic.Pointer[lineageMark] // the lineage that was last logged; nil: this process has never looked
	left    string                      // the start of the old primary that was last logged; guarded by looking
	last    *seenLineage                // guarded by looking
}

type seenLineage struct {
	objects.Lineage
	look  *lineageLook
	at    time.Time
	first time.Time // when the mark was first seen
}

// is returns the lineage as of now.
func (s *seenLineage) is() objects.Lineage {
	is := s.Lineage
	is.Age += time.Since(s.at)
	is.Seen = time.Since(s.first)
	if s.Age >= objects.SettledAge {
		is.Seen = is.Age
	}
	return is
}

// isElsewhere notes the server that has answered, and reports whether it is not the one that was
// inspected, so that Lineage will look again.
func (l *lineages) isElsewhere(server string) bool {
	seen := l.seen.Load()
	if seen == nil || seen.Server == server {
		return false
	}
	l.seen.CompareAndSwap(seen, nil)
	return true
}

// isNot notes that an inspected server is not the one that has answered.
func (l *lineages) isNot(server string) {
	if seen := l.seen.Load(); seen != nil && seen.Server == server {
		l.seen.CompareAndSwap(seen, nil)
	}
}

// checkServer returns [objects.ErrMoved] if a write names a server other than the one that has answered.
func (l *lineages) checkServer(cond objects.Condition, server string) error {
	if cond.Server == "" || cond.Server == server {
		return nil
	}
	l.isElsewhere(server)
	return objects.ErrMoved
}

// Lineage returns the table's lineage. It does I/O only if the lineage is not known.
func (t *Table) Lineage(ctx context.Context) (objects.Lineage, error) {
	if seen := t.lineages.seen.Load(); seen != nil {
		return seen.is(), nil
	}
	ctx, cancel := objects.Limited(ctx)
	defer cancel()
	select {
	case t.lineages.looking <- struct{}{}:
	case <-ctx.Done():
		return objects.Lineage{}, ctx.Err()
	}
	defer func() { <-t.lineages.looking }()
	if seen := t.lineages.seen.Load(); seen != nil {
		return seen.is(), nil
	}
	const most = 5 // others may be marking the table, or be promoting the next server
	for range most {
		look, err := t.lookBriefly(ctx)
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			continue
		}
		if err != nil {
			return objects.Lineage{}, t.setups.explain(err)
		}
		if t.cfg.Lossless { // one lineage without a mark, whatever server it is on
			seen := &seenLineage{objects.Lineage{Server: look.server}, look, look.at, look.at}
			t.lineages.seen.Store(seen)
			return seen.is(), nil
		}
		if last := t.lineages.last; last != nil && look.isBefore(last.look) {
			t.leaveOldPrimary(look)
			return objects.Lineage{}, errOldPrimary
		}
		// A mark of this very start is as good, even if one of the two looks saw no timeline: a server that was
		// demoted, or lost commits, has been restarted.
		if look.marked.Lineage == look.lineage || look.marked.Start == look.server {
			seen := &seenLineage{look.is(), look, look.at, look.at}
			if last := t.lineages.last; last != nil && last.Mark == seen.Mark {
				seen.first = last.first
			}
			t.lineages.last = seen
			t.lineages.seen.Store(seen)
			t.tellLineage(look)
			return seen.is(), nil
		}
		if err := t.mark(ctx, look, false); err != nil && !errors.Is(err, objects.ErrConflict) && !errors.Is(err, objects.ErrExists) {
			return objects.Lineage{}, t.setups.explain(err)
		}
	}
	return objects.Lineage{}, objects.ErrMoved
}

// lineageLook is what one statement has read on one server.
type lineageLook struct {
	server, lineage string
	marked          lineageMark
	version         int64 // of the mark; 0: there is none
	age             time.Duration
	at              time.Time // the answer's
}

// errOldPrimary is the error of leases' calls on a server from which the database has failed over.
var errOldPrimary = errors.New("an old primary still answers: the database has failed over from this server to another one (stop it, or keep it from being reached)")

// isBefore reports whether the server is an old primary, given what was last seen: it is in an earlier timeline of the same
// database, and no process has marked it since the later timeline was marked. A standby of the earlier timeline that is
// promoted is marked anew.
func (l *lineageLook) isBefore(last *lineageLook) bool {
	system, timeline, _ := strings.Cut(l.lineage, "/")
	lastSystem, lastTimeline, _ := strings.Cut(last.lineage, "/")
	return system == lastSystem && timeline < lastTimeline && l.marked.Lineage == l.lineage &&
		l.age > last.age+l.at.Sub(last.at)
}

// leaveOldPrimary gives up the connections to an old primary.
func (t *Table) leaveOldPrimary(look *lineageLook) {
	t.conns.Leave()
	if t.lineages.left == look.server {
		return
	}
	t.lineages.left = look.server
	t.cfg.Logger.Error("an old primary still answers", "from", t.lineages.told.Load().Lineage, "to", look.lineage, "seen_first", look.age.Round(time.Millisecond))
}

func (l *lineageLook) is() objects.Lineage {
	is := objects.Lineage{Server: l.server, Mark: l.marked.Nonce, Age: l.age}
	if l.marked.Settled {
		is.Age = objects.SettledAge
	}
	return is
}

// lookBriefly is lookAtLineage, but gives up a connection that hangs, which would block all leases' calls.
func (t *Table) lookBriefly(ctx context.Context) (*lineageLook, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return t.lookAtLineage(ctx)
}

// lookAtLineage reads the table's server and lineage, and its mark.
func (t *Table) lookAtLineage(ctx context.Context) (look *lineageLook, err error) {
	ctx = objects.WithLeaseCall(ctx)
	_, err = t.setups.call(ctx, mayRead, func(found *setup) error {
		look, err = t.lineageIn(ctx, found.in(lookAtLineage))
		switch pgconns.SQLState(err) {
		case pgconns.StateDenied, stateNoFunction, stateNotInState, stateNotSupported: // as on Aurora
			look, err = t.lineageIn(ctx, found.in(lookAtStart))
		}
		return err
	})
	return look, err
}

func (t *Table) lineageIn(ctx context.Context, text string) (*lineageLook, error) {
	var look lineageLook
	var payload *string
	var version, updated, nowUS *int64
	var start int64
	var lineage *string
	err := t.conns.Call(ctx, func(pool *pgxpool.Pool, _ bool) error {
		err := pgconns.QueryOne(ctx, pool, pgconns.Statement{
			SQL: text, Args: []any{lineageID.Type, lineageID.ID}, Dest: []any{&start, &lineage, &payload, &version, &updated, &nowUS},
		})
		if err == nil && lineage == nil {
			return pgconns.ErrStandby
		}
		return err
	})
	look.at = time.Now()
	if err != nil {
		return nil, err
	}
	look.server, look.lineage = strconv.FormatInt(start, 10), *lineage
	if version != nil {
		look.version = *version
		if payload != nil {
			_ = json.Unmarshal([]byte(*payload), &look.marked) // what can't be read is marked again
		}
		if updated != nil {
			look.age = max(0, objects.Age(sql.NullInt64{Int64: *updated, Valid: true}, time.UnixMicro(*nowUS)))
		}
	}
	return &look, nil
}

// mark marks the table, unless another process is faster. On a server that was never promoted or restored, a
// table's first mark says that nothing can have been lost. IsFirst says that of a server whose lineage does
// not show it.
func (t *Table) mark(ctx context.Context, look *lineageLook, isFirst bool) error {
	cond := objects.Condition{Kind: objects.IfAbsent, Server: look.server}
	if look.version != 0 {
		cond.Kind, cond.Version = objects.IfVersion, look.version
	}
	settled := look.version == 0 && (strings.HasSuffix(look.lineage, firstTimeline) || isFirst)
	payload, err := json.Marshal(lineageMark{Lineage: look.lineage, Start: look.server, Nonce: rand.Text(), Settled: settled})
	if err != nil {
		return err // it has only text
	}
	_, err = t.Put(objects.WithLeaseCall(ctx), objects.Row{ID: lineageID, Labels: []byte("{}"), Payload: payload}, cond, nil)
	return err
}

// markNew marks a table that was just created where each start counts as a lineage, because the first call of a
// lease would not know that the table is new. That alone does not say that nothing was lost: a failover may
// have lost the table together with a lease in it. The timeline says it. Where that can't be seen, and if
// markNew fails, leases wait for a TTL.
func (t *Table) markNew(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	look, err := t.lookAtLineage(ctx)
	if err != nil || look.version != 0 || strings.HasSuffix(look.lineage, firstTimeline) {
		return
	}
	isFirst := strings.Contains(look.lineage, firstTimeline+"/")
	if strings.HasPrefix(look.lineage, onlyStart) {
		err := t.setups.query(ctx, onFirstTimeline, []any{serverOf(look.server)}, &isFirst)
		isFirst = err == nil && isFirst
	}
	_ = t.mark(ctx, look, isFirst)
}

// tellLineage logs that the table is in a different lineage than before.
func (t *Table) tellLineage(look *lineageLook) {
	before := t.lineages.told.Swap(&look.marked)
	if before == nil && strings.HasPrefix(look.lineage, onlyStart) {
		t.cfg.Logger.Info("the role can't see the timeline of the server: each of its starts counts as a failover")
	}
	if before == nil || before.Nonce == look.marked.Nonce {
		return
	}
	t.cfg.Logger.Warn("the database has failed over, or was restored", "from", before.Lineage, "to", look.lineage, "seen_first", look.age.Round(time.Millisecond))
}

const (
	// The timeline is that of the WAL being written, because pg_control_checkpoint shows the old one for a
	// while. In recovery there is no such WAL, and no lineage. A promotion, or a restore to a point in time,
	// begins the next timeline.
	firstTimeline = "/00000001"
	onlyStart     = "start/"
	timeline      = `substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8)`

	// With fsync off, a restart may lose commits, as a failover may.
	ofServer = `
			SELECT {server} AS start, CASE WHEN NOT pg_is_in_recovery() THEN
				(SELECT system_identifier FROM pg_control_system()) || '/' || ` + timeline + `
				|| CASE current_setting('fsync') WHEN 'on' THEN '' ELSE '/' || {server} END END AS lineage`
	// Where these functions are missing or refused, each start counts as a lineage.
	ofStart = `
			SELECT {server} AS start, CASE WHEN NOT pg_is_in_recovery() THEN '` + onlyStart + `' || {server} END AS lineage`

	// A role may see the timeline although it may not see the system identifier.
	onFirstTimeline = `
			SELECT CASE WHEN NOT pg_is_in_recovery() AND ` + server + ` = $1::bigint THEN ` + timeline + ` = substr('` + firstTimeline + `', 2) ELSE false END`

	andMark = `
			SELECT start, lineage, payload, version, updated_at_ms, {now_us} FROM s LEFT JOIN (
				SELECT encode(payload, 'escape') AS payload, {version} AS version, updated_at_ms FROM {objects} WHERE object_type = $1 AND id = $2) mark ON true`

	lookAtLineage = `
			WITH s AS (` + ofServer + `)` + andMark
	lookAtStart = `
			WITH s AS (` + ofStart + `)` + andMark
)
