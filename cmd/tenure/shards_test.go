//go:build unix

package main

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/tenurelib/tenure/shards"
)

func TestListShowsHowEvenlyShardsAreSpread(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, s *site) {
		s.ask(t, "migrate")
		for _, name := range []string{"a", "b"} {
			session, _, stop := s.startSession(t, name)
			part, err := shards.New(session, shards.Config{Kind: "partition", Count: 5, Settle: 500 * time.Millisecond, Work: func(ctx context.Context, _ string) error {
				<-ctx.Done()
				return nil
			}})
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan error)
			go func() { ended <- part.Run(context.Background()) }()
			t.Cleanup(func() { stop(); <-ended })
		}
		eventually(t, soon, "all shards have an owner", func() bool {
			return strings.HasSuffix(s.ask(t, "list", "--sessions"), "\npartition: 5 shards on 2 processes, 2 to 3 on each\n")
		})
		eventually(t, soon, "one owns all, until the other notices", func() bool {
			s.exec(t, `UPDATE objects_claims SET session = (SELECT max(id) FROM objects WHERE object_type = 'tenure.session') WHERE kind = 'partition'`)
			return strings.HasSuffix(s.ask(t, "list", "--sessions"), "\npartition: 5 shards on 2 processes, 0 to 5 on each\n")
		})
		if status, text, _ := tenureCommand(t, "owner", "--store", s.store, "--key", "partition/4"); status != 0 || !strings.Contains(text, "owned") {
			t.Errorf("exit status %d: %s", status, text)
		}
		if text := s.ask(t, "list", "--sessions"); strings.Contains(text, "tenant") || !strings.Contains(text, "partition/member 1") {
			t.Errorf("the list is\n%s", text)
		}
	})
}
