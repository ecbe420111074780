package pgobjects

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
)

func TestWhatAPoolerDoesToPreparedStatementsIsExplained(t *testing.T) {
	s := &setups{conns: &pgconns.Conns{}}
	for code, isSetup := range map[string]bool{"26000": false, "42P05": true} {
		answer := &pgconn.PgError{Code: code}
		err := s.explain(answer)
		if !errors.Is(err, answer) || errors.Is(err, objects.ErrSetup) != isSetup ||
			!strings.Contains(err.Error(), "add default_query_exec_mode=exec to the URL") {
			t.Errorf("%s: %v", code, err)
		}
	}
}
