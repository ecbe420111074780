package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/claims"
)

// plans are those with which a server has executed statements on the table of rows, as it reports them.
type plans struct {
	mu   sync.Mutex                // guards seen
	seen map[string]map[string]int // how often each plan was seen, by what was done
	what string
}

// notice reads what auto_explain says.
func (p *plans) notice(_ *pgconn.PgConn, n *pgconn.Notice) {
	_, plan, found := strings.Cut(n.Message, "plan:\n")
	if !found {
		return
	}
	var scans []string
	for line := range strings.Lines(plan) {
		if scan := scanned.FindString(line); scan != "" && !slices.Contains(scans, scan) {
			scans = append(scans, scan)
		}
	}
	if !strings.Contains(strings.Join(scans, " "), "tasks") {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.seen[p.what] == nil {
		p.seen[p.what] = map[string]int{}
	}
	p.seen[p.what][strings.Join(scans, ", ")]++
}

var scanned = regexp.MustCompile(`(Seq Scan on tasks|Index (Only )?Scan( Backward)? using \S+|Bitmap Index Scan on \S+)`)

func (p *plans) of(what string) {
	time.Sleep(50 * time.Millisecond) // a notice may still be on its way
	p.mu.Lock()
	defer p.mu.Unlock()
	p.what = what
}

// showPlans does each thing that package claims does to rows, and reports the plans of its
// statements. It fails if one reads the whole table.
func showPlans(ctx context.Context, b *bench, url string, size int) error {
	p := &plans{seen: map[string]map[string]int{}, what: "begin"}
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return err
	}
	cfg.MaxConns = queueWorkers
	cfg.ConnConfig.OnNotice = p.notice
	for name, value := range map[string]string{
		"session_preload_libraries": "auto_explain", "auto_explain.log_min_duration": "0", "auto_explain.log_level": "notice",
		"auto_explain.log_nested_statements": "on", "client_min_messages": "notice",
	} {
		cfg.ConnConfig.RuntimeParams[name] = value
	}
	open := func() (*claimsQueue, error) {
		pool, err := pgxpool.NewWithConfig(ctx, cfg)
		if err != nil {
			return nil, err
		}
		return newClaimsQueue(ctx, pool, fastTTL)
	}
	q, err := open()
	if err != nil {
		return err
	}
	defer q.close()
	take := func(n int) (got []claims.Claim) {
		if err == nil {
			got, err = q.rows.Take(ctx, n)
		}
		return got
	}
	do := func(what string, fn func(got []claims.Claim) error) {
		const often = 8 // generic plans come after five
		for range often {
			p.of("take")
			one, many := take(1), take(100)
			if err != nil {
				return
			}
			p.of(what)
			if err = fn(one); err == nil {
				err = fn(many)
			}
			if err != nil {
				return
			}
		}
	}
	do("Finish", func(got []claims.Claim) error { return q.rows.Finish(ctx, got...) })
	do("FinishPostgres", func(got []claims.Claim) error {
		return q.rows.FinishPostgres(ctx, got, func(pgx.Tx) error { return nil })
	})
	do("FinishTx's statement", func(got []claims.Claim) error {
		query, args, err := q.rows.FinishStatement(got[0])
		if err == nil {
			_, err = q.pool.Exec(ctx, query, args...)
		}
		if len(got) > 1 {
			err = errors.Join(err, q.rows.Release(ctx, got[1:]...))
		}
		return err
	})
	do("Release", func(got []claims.Claim) error { return q.rows.Release(ctx, got...) })
	do("ReleaseAfter", func(got []claims.Claim) error { return q.rows.ReleaseAfter(ctx, time.Millisecond, got...) })
	do("OwnedBy", func(got []claims.Claim) error {
		owned, err := q.rows.OwnedBy(ctx, q.session.ID())
		if err == nil && len(owned) < len(got) {
			err = fmt.Errorf("%d rows are owned", len(owned))
		}
		return errors.Join(err, q.rows.Release(ctx, got...))
	})
	if err != nil {
		return err
	}
	// The sweep, and what another process does when it buries a session.
	p.of("sweep and burial")
	lost, err := open()
	if err != nil {
		return err
	}
	defer lost.close()
	if _, err := lost.rows.Take(ctx, 1000); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	id := lost.session.ID()
	if _, err := conn.Exec(ctx, `DELETE FROM objects WHERE object_type = 'tenure.session' AND id = $1`, id); err != nil {
		return err
	}
	for left := true; left; {
		if err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM tasks WHERE session = $1)`, id).Scan(&left); err != nil {
			return err
		}
		if err := pause(ctx, fastTTL/10); err != nil {
			return err
		}
	}
	p.of("")
	var whole []string
	p.mu.Lock()
	defer p.mu.Unlock()
	for what, seen := range p.seen {
		for plan, n := range seen {
			b.report.note("rows-sustained", "plans of "+what, fmt.Sprintf("%d × %s", n, plan))
			if strings.Contains(plan, "Seq Scan on tasks") {
				whole = append(whole, what)
			}
		}
	}
	switch {
	case len(p.seen) < 8:
		return fmt.Errorf("plans of only %d things were seen", len(p.seen))
	case len(whole) > 0:
		return fmt.Errorf("the whole table of %d rows is read by: %v", size, whole)
	}
	return nil
}
