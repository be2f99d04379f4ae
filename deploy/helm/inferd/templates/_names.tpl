{{- define "inferd.name" -}}
{{ .Values.fullnameOverride | default .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "inferd.selector" -}}
app.kubernetes.io/name: inferd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "inferd.labels" -}}
{{ include "inferd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* preStop, then the whole stop of the server: readiness false, requests in flight, and 15 s for workers to end. */}}
{{- define "inferd.graceSeconds" -}}
{{ add .Values.preStopSeconds (ceil .Values.config.server.drain_delay_s) (ceil .Values.config.server.grace_s) 15 }}
{{- end }}
