package databases_test

import (
	"context"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

var scannedTasks = regexp.MustCompile(`Seq Scan on tasks|Index (Only )?Scan( Backward)? using tasks\S*|Bitmap Index Scan on tasks\S*`)

// executedPlans are the plans with which a server has executed statements on the table of rows, as
// auto_explain reports them.
type executedPlans struct {
	mu   sync.Mutex          // guards the fields below
	what string              // the operation that is under way
	seen map[string][]string // by operation
}

func (p *executedPlans) notice(_ *pgconn.PgConn, n *pgconn.Notice) {
	_, plan, _ := strings.Cut(n.Message, "plan:\n")
	if scans := scannedTasks.FindAllString(plan, -1); len(scans) > 0 {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.seen[p.what] = append(p.seen[p.what], strings.Join(slices.Compact(scans), ", "))
	}
}

func (p *executedPlans) of(what string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.what = what
}

// The plans are those of statements as the library sends them, including the generic plans that the
// server may choose after five executions.
func TestNoOperationOnRowsReadsTheWholeTable(t *testing.T) {
	testkit.Slow(t)
	const size, ttl = 50_000, 6 * time.Second
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	url := testkit.PostgresURL(t)
	p := &executedPlans{seen: map[string][]string{}}
	cfg := testkit.Must(pgxpool.ParseConfig(url))
	cfg.ConnConfig.OnNotice = p.notice
	for name, value := range map[string]string{
		"session_preload_libraries": "auto_explain", "auto_explain.log_min_duration": "0", "auto_explain.log_level": "notice",
		"auto_explain.log_nested_statements": "on", "client_min_messages": "notice",
	} {
		cfg.ConnConfig.RuntimeParams[name] = value
	}
	table := claims.QueueConfig{Table: "tasks", Attempts: "attempts", NotBefore: "not_before", Ready: "status = 'queued'", Done: "status = 'done'"}
	admin := testkit.PostgresPool(t, url)
	testkit.MigrateClaims(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	testkit.ExecPostgres(t, admin, `CREATE TABLE tasks (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, status text NOT NULL)`)
	testkit.ExecPostgres(t, admin, testkit.Must(table.PostgresDDL()))
	testkit.ExecPostgres(t, admin, `INSERT INTO tasks (status) SELECT CASE WHEN i <= $1 * 9 / 10 THEN 'done' ELSE 'queued' END FROM generate_series(1, $1) i`, size)
	testkit.ExecPostgres(t, admin, `VACUUM ANALYZE tasks`)

	open := func() (*pgxpool.Pool, *claims.Session, *claims.Worker, *claims.Queue) {
		pool := testkit.Must(pgxpool.NewWithConfig(ctx, cfg))
		t.Cleanup(pool.Close)
		store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet}))
		session := testkit.Must(claims.NewSession(store, claims.SessionConfig{TTL: ttl, Logger: testkit.Quiet}))
		queue := testkit.Must(claims.NewQueue(store, table))
		worker := testkit.Must(claims.NewWorker(session, queue))
		running, stop := context.WithCancel(context.WithoutCancel(ctx))
		over := make(chan struct{})
		go func() { defer close(over); _ = session.Run(running) }()
		t.Cleanup(func() { stop(); <-over; store.Close() })
		testkit.Await(t, "the session begins", session.Valid)
		return pool, session, worker, queue
	}
	pool, session, worker, queue := open()
	for _, op := range []struct {
		what string
		do   func(got []claims.Claim) error
	}{
		{"Finish", func(got []claims.Claim) error { return queue.Finish(ctx, got...) }},
		{"FinishPostgres", func(got []claims.Claim) error {
			return queue.FinishPostgres(ctx, got, func(pgx.Tx) error { return nil })
		}},
		{"FinishStatement", func(got []claims.Claim) error {
			for _, c := range got {
				query, args, err := queue.FinishStatement(c)
				testkit.WantErr(t, err, nil)
				testkit.ExecPostgres(t, pool, query, args...)
			}
			return nil
		}},
		{"Release", func(got []claims.Claim) error { return worker.Release(ctx, got...) }},
		{"ReleaseAfter", func(got []claims.Claim) error { return queue.ReleaseAfter(ctx, time.Millisecond, got...) }},
		{"OwnedBy", func(got []claims.Claim) error {
			if owned, err := queue.OwnedBy(ctx, session.ID()); err != nil || len(owned) < len(got) {
				t.Errorf("%d rows are owned, error %v", len(owned), err)
			}
			return worker.Release(ctx, got...)
		}},
	} {
		for i := range 16 {
			p.of("Take")
			got, err := worker.Take(ctx, []int{1, 100}[i%2])
			testkit.WantErr(t, err, nil)
			p.of(op.what)
			testkit.WantErr(t, op.do(got), nil)
		}
	}
	// What another process does when a session is gone.
	p.of("sweep")
	_, lost, theirs, _ := open()
	_, err := theirs.Take(ctx, 1000)
	testkit.WantErr(t, err, nil)
	id := lost.ID()
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Await(t, "its record is removed", func() bool { // it may be renewed meanwhile
		record, err := store.Get(ctx, claims.SessionKey(id))
		return err == nil && store.DeleteIf(ctx, record.Key, tenure.IfVersion(record.Version)) == nil
	})
	testkit.Await(t, "its rows are free", func() bool { return len(testkit.Must(queue.OwnedBy(ctx, id))) == 0 })
	p.of("")
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, what := range []string{"Take", "Finish", "FinishPostgres", "FinishStatement", "Release", "ReleaseAfter", "OwnedBy", "sweep"} {
		plans := p.seen[what]
		slices.Sort(plans)
		t.Log(what, slices.Compact(slices.Clone(plans)))
		if len(plans) == 0 {
			t.Errorf("no plan of %s was seen", what)
		}
		for _, plan := range plans {
			if strings.Contains(plan, "Seq Scan") {
				t.Errorf("%s reads the whole table of %d rows: %s", what, size, plan)
			}
		}
	}
}
