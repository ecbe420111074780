//go:build unix

package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// startSession runs a session until the test ends or stop is called, and returns its tenants.
func (s *site) startSession(t *testing.T, holder string) (session *claims.Session, tenants *claims.Keys, stop func()) {
	t.Helper()
	return s.startSessionWith(t, s.open(t), claims.SessionConfig{Holder: holder, Labels: map[string]string{"address": holder + ":8080"}})
}

func (s *site) startSessionWith(t *testing.T, store tenure.Store, cfg claims.SessionConfig) (session *claims.Session, tenants *claims.Keys, stop func()) {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	session, err := claims.NewSession(store, cfg)
	if err != nil {
		t.Fatal(err)
	}
	tenants, err = claims.NewKeys(session, "tenant")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	returned := make(chan error, 1)
	go func() { returned <- session.Run(ctx) }()
	stop = func() { cancel(); <-returned; returned <- nil }
	t.Cleanup(stop)
	return session, tenants, stop
}

func (s *site) exec(t *testing.T, statements string) {
	t.Helper()
	if isPostgres(s.store) {
		execSQL(t, connect(t, s.store), statements)
	} else {
		execSQLite(t, s.store, statements)
	}
}

func TestOwnerTellsWhoOwnsAKey(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, s *site) {
		owner := func(key string, want int, lines ...string) (v ownerView) {
			t.Helper()
			status, stdout, stderr := tenureCommand(t, "owner", "--store", s.store, "--key", key)
			for _, line := range lines {
				if !regexp.MustCompile(`(?m)^` + line + `$`).MatchString(stdout) {
					t.Errorf("it prints no %q:\n%s", line, stdout)
				}
			}
			if status != want || stderr != "" {
				t.Errorf("exit status %d and %q, want %d", status, stderr, want)
			}
			status, stdout, _ = tenureCommand(t, "owner", "--store", s.store, "--key", key, "--json")
			if err := json.Unmarshal([]byte(stdout), &v); err != nil || status != want || v.Key != key {
				t.Errorf("--json: exit status %d, %v, %s", status, err, stdout)
			}
			return v
		}
		s.ask(t, "migrate")
		if v := owner("tenant/acme", 4, "state +unused: .*"); v.State != "unused" {
			t.Errorf("the state is %q", v.State)
		}

		session, tenants, stop := s.startSession(t, "a")
		got, err := tenants.TryClaim(t.Context(), "acme", "glo/bex", "umbrella")
		if err != nil || len(got) != 3 {
			t.Fatal(got, err)
		}
		v := owner("tenant/acme", 0, "key +tenant/acme", `state +owned; its session expires in \S+ unless renewed`, "owner +a", "label +address=a:8080", `token +\d+`, "session +"+session.ID())
		if v.State != "held" || v.Session != session.ID() || v.Holder != "a" || v.Labels["address"] != "a:8080" || v.TTLMS != 30_000 || v.RenewedAt == nil {
			t.Errorf("the owner is %+v", v)
		}
		for _, c := range got {
			if c.Key.ID == "acme" && c.Token != v.Token {
				t.Errorf("the token is %d, want %d", v.Token, c.Token)
			}
		}
		owner("tenant/glo/bex", 0)
		owner("account/acme", 4)
		for _, c := range got {
			if c.Key.ID == "umbrella" {
				if err := tenants.Release(t.Context(), c); err != nil {
					t.Fatal(err)
				}
			}
		}
		if v := owner("tenant/umbrella", 3, "state +free: nobody owns it"); v.State != "free" || v.Token == 0 {
			t.Errorf("the owner is %+v", v)
		}

		// As a crashed session leaves its record and rows, and as they are once it was removed.
		s.exec(t, `UPDATE objects_claims SET session = 'crashed' WHERE id = 'acme'; UPDATE objects_claims SET session = 'buried' WHERE id = 'glo/bex'`)
		stop()
		s.exec(t, `DELETE FROM objects`)
		crashed, err := tenure.NewLease(s.open(t), tenure.LeaseConfig{Key: tenure.Key{Type: "tenure.session", ID: "crashed"}, Holder: "b"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := crashed.TryAcquire(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.exec(t, `UPDATE objects SET updated_at_ms = updated_at_ms - 60000`)
		if v := owner("tenant/acme", 3, "state +free: the session of its owner has expired", "owner +b"); v.State != "expired" || v.Holder != "b" {
			t.Errorf("the owner is %+v", v)
		}
		if v := owner("tenant/glo/bex", 3, "state +free: its owner is gone", "session +buried"); v.State != "gone" || v.Holder != "" {
			t.Errorf("the owner is %+v", v)
		}
	})
}

func TestListShowsSessionsAndWhatTheyOwn(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, s *site) {
		s.ask(t, "migrate")
		if got := s.ask(t, "list", "--sessions", "--json"); got != "[]\n" {
			t.Errorf("at first the list is %q", got)
		}
		a, tenants, stop := s.startSession(t, "a")
		if _, err := tenants.TryClaim(t.Context(), "one", "two", "three"); err != nil {
			t.Fatal(err)
		}
		sandboxes, err := claims.NewKeys(a, "sandbox")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := sandboxes.TryClaim(t.Context(), "box"); err != nil {
			t.Fatal(err)
		}
		b, _, _ := s.startSession(t, "b") // owns nothing
		eventually(t, soon, "b has begun", b.Valid)
		list := func(args ...string) (text string) {
			eventually(t, soon, "what is not freed yet is listed", func() bool { // b's first look may free it
				s.exec(t, `INSERT INTO objects_claims (kind, id, session, token) VALUES ('tenant', 'lost', 'buried', 1) ON CONFLICT (kind, id) DO UPDATE SET session = 'buried'`)
				text = s.ask(t, "list", append([]string{"--sessions"}, args...)...)
				return strings.Contains(text, "buried")
			})
			return text
		}
		text := list()
		lines := strings.Split(strings.TrimSpace(text), "\n")
		if len(lines) != 4 {
			t.Fatalf("the list is\n%s", text)
		}
		for i, want := range []string{
			`SESSION +HOLDER +FOR +STATE +CLAIMS +LABELS`,
			`buried +gone; what it owns is free +tenant 1 *`,
			a.ID() + ` +a +\d+s +valid, expires in \S+ unless renewed +sandbox 1, tenant 3 +address=a:8080`,
			b.ID() + ` +b +\d+s +valid, expires in \S+ unless renewed +none +address=b:8080`,
		} {
			if !regexp.MustCompile(`^` + want + `$`).MatchString(lines[i]) {
				t.Errorf("line %d is %q, want %q", i, lines[i], want)
			}
		}
		sessions := func() (views []sessionView) {
			t.Helper()
			if err := json.Unmarshal([]byte(list("--json")), &views); err != nil {
				t.Fatal(err)
			}
			return views
		}
		views := sessions()
		if len(views) != 3 || views[0].State != "gone" || views[0].Claims[0] != (kindView{Kind: "tenant", Claims: 1}) {
			t.Errorf("the list is %+v", views)
		}
		if v := views[1]; v.Session != a.ID() || v.State != "held" || v.Holder != "a" || v.Labels["address"] != "a:8080" || len(v.Claims) != 2 || time.Since(*v.AcquiredAt) > soon {
			t.Errorf("the list is %+v", views)
		}
		stop()
		for _, v := range sessions() {
			if v.Session == a.ID() {
				t.Errorf("a session that has ended is listed: %+v", v)
			}
		}
	})
}

func TestWithoutTheTableOfClaimsThereAreNoSessions(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, s *site) {
		s.ask(t, "migrate")
		s.exec(t, `DROP TABLE objects_claims`) // as an earlier version leaves it
		if status, stdout, stderr := tenureCommand(t, "list", "--sessions", "--store", s.store); status != 0 || strings.Count(stdout, "\n") != 1 || stderr != "no sessions: no program uses package claims here\n" {
			t.Errorf("list: exit status %d, %q and %q", status, stdout, stderr)
		}
		if status, _, stderr := tenureCommand(t, "owner", "--key", "tenant/acme", "--store", s.store); status != exitUnused || stderr != "" {
			t.Errorf("owner: exit status %d and %q", status, stderr)
		}
		for _, args := range [][]string{{"list", "--sessions"}, {"owner", "--key", "tenant/acme"}} {
			if status, _, stderr := tenureCommand(t, append(args, "--store", s.store, "--table", "none")...); status != 1 || !strings.HasSuffix(stderr, "run \"tenure migrate --table 'none'\"\n") {
				t.Errorf("%v without any table: exit status %d and %q", args, status, stderr)
			}
		}
		other := []string{"--table", "leases"}
		if isPostgres(s.store) {
			other = append(other, "--schema", "else where")
		}
		s.ask(t, "migrate", other...)
		if got := s.ask(t, "list", append(other, "--sessions", "--json")...); got != "[]\n" {
			t.Errorf("in another table the list is %q", got)
		}
		if status, _, stderr := tenureCommand(t, append([]string{"list", "--sessions", "--store", s.store}, other...)...); status != 0 || stderr != "no sessions\n" {
			t.Errorf("in another table: exit status %d and %q", status, stderr)
		}
		if status, _, stderr := tenureCommand(t, append([]string{"owner", "--store", s.store, "--key", "tenant/acme"}, other...)...); status != 4 || stderr != "" {
			t.Errorf("in another table: exit status %d and %q", status, stderr)
		}
	})
}

// What is counted has an end, so that a look at a process with millions of keys does not fail.
func TestAKindIsCountedUpToALimit(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	s.ask(t, "migrate")
	s.exec(t, `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i <= 100000)
		INSERT INTO objects_claims (kind, id, session, token) SELECT 'tenant', i, 's', i FROM n`)
	if got := s.ask(t, "list", "--sessions"); !strings.Contains(got, " tenant 100000+ ") {
		t.Errorf("the list is\n%s", got)
	}
	if got := s.ask(t, "list", "--sessions", "--json"); !strings.Contains(got, `{"kind":"tenant","claims":100000,"more":true}`) {
		t.Errorf("the list is %s", got)
	}
	s.exec(t, `DELETE FROM objects_claims WHERE id = '7'`)
	if got := s.ask(t, "list", "--sessions", "--json"); !strings.Contains(got, `{"kind":"tenant","claims":100000}`) {
		t.Errorf("the list is %s", got)
	}
}

func TestTheRowsOfQueuesAreShown(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, s *site) {
		s.ask(t, "migrate")
		cfg := claims.QueueConfig{Table: "runs", Token: "fence", Logger: slog.New(slog.DiscardHandler)}
		ddl, err := cfg.SQLiteDDL()
		if isPostgres(s.store) {
			ddl, err = cfg.PostgresDDL()
		}
		if err != nil {
			t.Fatal(err)
		}
		s.exec(t, `CREATE TABLE runs (id integer PRIMARY KEY); INSERT INTO runs VALUES (16), (17), (18);`+ddl)
		store := s.open(t)
		session, err := claims.NewSession(store, claims.SessionConfig{Holder: "a", Logger: cfg.Logger})
		if err != nil {
			t.Fatal(err)
		}
		tenants, err := claims.NewKeys(session, "tenant")
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(context.Background())
		returned := make(chan error, 1)
		go func() { returned <- session.Run(ctx) }()
		defer func() { stop(); <-returned }()
		queue, err := claims.NewQueue(store, cfg)
		if err != nil {
			t.Fatal(err)
		}
		worker, err := claims.NewWorker(session, queue)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tenants.TryClaim(t.Context(), "acme"); err != nil {
			t.Fatal(err)
		}
		got, err := worker.Claim(t.Context(), "16", "17")
		if err != nil || len(got) != 2 {
			t.Fatal(got, err)
		}
		eventually(t, soon, "the queue is known", func() bool {
			return strings.Contains(s.ask(t, "list", "--sessions"), "runs 2, tenant 1")
		})
		for key, want := range map[string]int{"runs/17": 0, "runs/18": 3, "runs/19": 4, "walks/17": 4} {
			status, stdout, stderr := tenureCommand(t, "owner", "--store", s.store, "--key", key)
			if status != want || stderr != "" || want == 0 && !strings.Contains(stdout, session.ID()) {
				t.Errorf("%s: exit status %d, %s and %s", key, status, stdout, stderr)
			}
		}
		s.exec(t, `DROP TABLE runs`)
		if status, stdout, stderr := tenureCommand(t, "list", "--store", s.store, "--sessions"); status != 0 || !strings.Contains(stdout, "tenant 1") || !strings.Contains(stderr, "runs") || strings.Count(stderr, "\n") != 1 {
			t.Errorf("without the table: exit status %d, %s and %s", status, stdout, stderr)
		}
	})
}

func TestDrainFindsTheReplicaOfASession(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, s *site) {
		s.ask(t, "migrate")
		store := s.open(t)
		drain, err := tenure.NewDrain(store, "a", slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		ran := make(chan error, 1)
		go func() { ran <- drain.Run(ctx) }()
		t.Cleanup(func() { cancel(); <-ran })
		a, tenants, _ := s.startSessionWith(t, store, claims.SessionConfig{Holder: "a", Drain: drain})
		claim, err := tenants.TryClaim(t.Context(), "acme", "umbrella")
		if err != nil || len(claim) != 2 {
			t.Fatal(claim, err)
		}
		slices.SortFunc(claim, func(a, b claims.Claim) int { return strings.Compare(a.Key.ID, b.Key.ID) })
		if err := tenants.Detach(claim[0]); err != nil {
			t.Fatal(err)
		}
		command := func(want int, wantOut, wantErr string, args ...string) {
			t.Helper()
			status, stdout, stderr := tenureCommand(t, append([]string{"drain", "--store", s.store}, args...)...)
			if status != want || !strings.Contains(stdout, wantOut) || !strings.Contains(stderr, wantErr) || wantErr == "" && stderr != "" {
				t.Errorf("%v: exit status %d, %q and %q; want %d, %q and %q", args, status, stdout, stderr, want, wantOut, wantErr)
			}
		}
		command(1, "", "a is the only replica with a session", "--session", a.ID())
		command(1, "", "there is no session nobody", "--session", "nobody")
		b, others, stop := s.startSession(t, "b")
		if _, err := others.TryClaim(t.Context(), "globex"); err != nil { // waits for the session
			t.Fatal(err)
		}
		idOfB := b.ID()
		command(0, "\na ", "", "--session", a.ID())
		eventually(t, soon, "b gets what a has given back", func() bool {
			got, err := others.TryClaim(t.Context(), "acme", "umbrella")
			return err == nil && len(got) == 1 && got[0].Key == claim[1].Key
		})
		command(1, "\na ", "a still holds 1 of tenant: it has not stopped yet, has vanished, or does not follow the mark (its program must set CoordinatorConfig.Drain", "--session", a.ID(), "--wait", "1s")
		if err := claims.ReleaseDetached(t.Context(), store, claim[0]); err != nil {
			t.Fatal(err)
		}
		command(0, "\na ", "", "--session", a.ID(), "--wait", "1m")
		stop()
		command(1, "", "there is no session "+idOfB, "--session", idOfB)
		command(0, "\nb ", "b holds nothing and has no session; the store does not know", "--replica", "b", "--force")
	})
}
